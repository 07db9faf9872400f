"""Requests to a Determined master, from your machine and from the search runner's container.

Requests go through determined's client, which is imported in functions, because only tuning on a
cluster needs it.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dsat.command.ds_config import DSAT_TRIAL_KEY
from dsat.command.experiment import parse_yaml
from dsat.in_trial.cluster_rank import LOG_MARK

OVER = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
_LOG_LINES = 400
_MARKS = "[dsat-"
_LATE_LOGS_S = (0.5, 1.0, 2.0)  # the last lines may arrive after the end of the trial
UNREACHABLE, ANSWERS_AGAIN = "the master does not answer", "the master answers again"
_AWAY_LIMIT_S, _ERROR_LIMIT_S = 1800.0, 120.0
_LONGEST_PAUSE_S = 30.0
_INTERNAL_ERROR = 500
_GATEWAY = (502, 503, 504)  # statuses of a proxy, whose answer is a web page
_BUSY = (408, 429)  # of a proxy: the request took too long, or too many came
# JSON escapes an emoji as two surrogates, which YAML refuses.
_SURROGATES = re.compile(r"\\ud[89ab]..\\ud[c-f]..")
_OBJECT = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>:?\s*")
T = TypeVar("T")


class Master:
    """Session with a master; requests wait while the master is unreachable."""

    def __init__(self, determined: Any, say: Callable[[str], None]) -> None:
        from determined.common.api import bindings, read_paginated

        self._api: Any = bindings
        self._read_paginated: Any = read_paginated
        self._determined = determined
        self.session = determined._session
        self.address = str(self.session.master)
        self._say = say

    @classmethod
    def from_task(cls, say: Callable[[str], None]) -> Master:
        from determined.experimental import client

        client._require_singleton(lambda: None)()
        return cls(client._determined, say)

    def url(self, experiment_id: int) -> str:
        """Return the web UI's address of an experiment."""
        return f"{self.address}/det/experiments/{experiment_id}"

    def version(self) -> tuple[int, int] | None:
        """Return the master's major and minor version; None if unknown."""
        text = str(self.session.get("/api/v1/master").json().get("version", ""))
        match = re.match(r"v?(\d+)\.(\d+)", text)
        return None if match is None else (int(match[1]), int(match[2]))

    def ask(self, request: Callable[[], T]) -> T:
        """Return the answer to a request, which must be harmless if repeated.

        After an error, the request is repeated for up to `retry_limit_s(error)`.
        """
        waited_s: dict[str, float] = {}  # by problem
        pause_s = 1.0
        while True:
            try:
                answer = request()
                if waited_s:
                    self._say(ANSWERS_AGAIN)
                return answer
            except Exception as error:
                problem = describe_failure(error)
                if waited_s.get(problem, 0.0) >= retry_limit_s(error):
                    raise
                if problem not in waited_s:
                    self._say(f"{problem} ({describe_error(error)}); trying again")
            time.sleep(pause_s)
            waited_s[problem] = waited_s.get(problem, 0.0) + pause_s
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def create(self, config: Mapping[str, Any], folder: Path, includes: Sequence[Path] = ()) -> int:
        """Create an experiment; return its id.

        The configuration is passed as JSON, because the master's YAML differs from Python's: it
        reads an unquoted `no` as a boolean.
        """
        with silence_determined(), tempfile.TemporaryDirectory() as folder_name:
            path = Path(folder_name) / "experiment.json"
            path.write_text(_SURROGATES.sub(_decode, json.dumps(config)), encoding="utf-8")
            new = self._determined.create_experiment(path, str(folder), list(map(str, includes)))
        return int(new.id)

    def find(self, tag: str) -> Any:
        """Return the experiment whose description begins with a tag; None if there is none."""
        pages = self._read_paginated(
            lambda offset: self.ask(
                lambda: self._api.get_GetExperiments(
                    self.session, description=tag, offset=offset, limit=100
                )
            )
        )
        listed = (experiment for page in pages for experiment in page.experiments)
        return next((e for e in listed if (e.description or "").startswith(tag)), None)

    def find_or_create(
        self, tag: str, config: Mapping[str, Any], model_dir: Path, includes: Sequence[Path]
    ) -> int:
        """Find the experiment whose description begins with a tag, or create it; return its id.

        This avoids a second experiment after a runner died before saving the id, or after a
        connection dropped.
        """

        def attempt() -> int:
            experiment = self.find(tag)
            return int(experiment.id) if experiment else self.create(config, model_dir, includes)

        return self.ask(attempt)

    def state(self, experiment_id: int) -> str:
        """Return an experiment's state: `ACTIVE`, `PAUSED`, `STOPPING_CANCELED` and so on."""
        return self.ask(lambda: self.state_now(experiment_id))

    def state_now(self, experiment_id: int) -> str:
        """Return an experiment's state by one request, without retries."""
        return state_name(self._experiment(experiment_id).state)

    def submitted_config(self, experiment_id: int) -> dict[str, Any]:
        """Return an experiment's configuration as submitted, without the cluster's defaults."""
        experiment = self.ask(lambda: self._experiment(experiment_id))
        return dict(parse_yaml(experiment.originalConfig) or {})

    def file(self, experiment_id: int, name: str) -> str:
        """Return the text of a file in an experiment's context."""
        body = self._api.v1GetModelDefFileRequest(path=name)
        answer = self.ask(
            lambda: self._api.post_GetModelDefFile(
                self.session, body=body, experimentId=experiment_id
            )
        )
        return base64.b64decode(answer.file or "").decode()

    def newest_checkpoint(self, experiment_id: int) -> str | None:
        """Return the UUID of an experiment's latest completed checkpoint; None if there is none."""
        answer = self.ask(
            lambda: self._api.get_GetExperimentCheckpoints(
                self.session,
                id=experiment_id,
                limit=1,
                sortByAttr=self._api.checkpointv1SortBy.BATCH_NUMBER,
                orderBy=self._api.v1OrderBy.DESC,
                states=[self._api.checkpointv1State.COMPLETED],
            )
        )
        return answer.checkpoints[0].uuid if answer.checkpoints else None

    def _experiment(self, experiment_id: int) -> Any:
        return self._api.get_GetExperiment(self.session, experimentId=experiment_id).experiment

    def kill(self, experiment_id: int) -> None:
        """Kill an experiment, if it exists."""
        from determined.common.api import errors

        with contextlib.suppress(errors.NotFoundException):
            self.ask(lambda: self._api.post_KillExperiment(self.session, id=experiment_id))

    def cancel(self, experiment_id: int) -> None:
        """Cancel an experiment; unlike `kill`, this lets its processes end by themselves."""
        self.ask(lambda: self._api.post_CancelExperiment(self.session, id=experiment_id))

    def describe(self, experiment_id: int, text: str) -> None:
        self.ask(lambda: self._determined.get_experiment(experiment_id).set_description(text))

    def trials(self, experiment_id: int) -> list[Any]:
        return self.ask(lambda: list(self._determined.get_experiment(experiment_id).iter_trials()))

    def running_trials(self, experiment_id: int) -> dict[tuple[int, int], int]:
        """Return ids of running trials, by (number in the search, restarts); do not retry."""
        pages = self._read_paginated(
            lambda offset: self._api.get_GetExperimentTrials(
                self.session, experimentId=experiment_id, offset=offset, limit=100
            )
        )
        return {
            (_id_in_search(trial), trial.restarts): trial.id
            for page in pages
            for trial in page.trials
            if state_name(trial.state) == "RUNNING"
        }

    def kill_trial(self, trial_id: int) -> None:
        """Kill a trial, but not its experiment."""
        self.ask(lambda: self._api.post_KillTrial(self.session, id=trial_id))


def read_trial_log(master: Master, experiment_id: int, trial_id: int) -> Sequence[str]:
    """Return dsat's lines in a trial's log, and then the last `_LOG_LINES` lines.

    `trial_id` is the trial's number in the search; if there is no such trial, return no lines.
    """
    trials = master.trials(experiment_id)
    trial: Any = next((t for t in trials if _id_in_search(t) == trial_id), None)
    lines: list[str] = []
    for pause_s in (0.0, *_LATE_LOGS_S) if trial is not None else ():
        time.sleep(pause_s)
        lines = master.ask(
            lambda: [*trial.iter_logs(search_text=_MARKS), *trial.iter_logs(tail=_LOG_LINES)]
        )
        if any(LOG_MARK in line for line in lines):
            break
    return lines


def _id_in_search(trial: Any) -> Any:
    return ((trial.hparams or {}).get(DSAT_TRIAL_KEY) or {}).get("id")


def _decode(escaped: re.Match[str]) -> str:
    return str(json.loads(f'"{escaped[0]}"'))


def state_name(state: Any) -> str:
    """Return a state of determined's bindings without its prefix."""
    return str(state.value).removeprefix("STATE_")


def is_ending(state: str) -> bool:
    """Return whether an experiment in this state has ended or is stopping."""
    return state in OVER or state.startswith("STOPPING_")


@contextlib.contextmanager
def silence_determined() -> Iterator[None]:
    """Hide standard output, such as determined's progress bar, and warnings of its code."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def is_unreachable(error: BaseException) -> bool:
    """Return whether an error means that the master is unreachable; False for a refusal."""
    from determined.common.api import errors

    if isinstance(error, errors.APIException):
        return int(error.status_code) in (*_BUSY, *range(502, 600))
    refused = (errors.ForbiddenException, errors.UnauthenticatedException)
    away = (errors.BadRequestException, OSError)  # the requests package raises OSErrors
    return isinstance(error, away) and not isinstance(error, refused)


def retry_limit_s(error: BaseException) -> float:
    """Return how long to repeat a request after an error, in seconds; 0 if it was refused."""
    if _is_internal(error):  # either transient (the database restarts), or a lack of slots
        return _ERROR_LIMIT_S
    return _AWAY_LIMIT_S if is_unreachable(error) else 0.0


def _is_internal(error: BaseException) -> bool:
    return getattr(error, "status_code", None) == _INTERNAL_ERROR


def describe_failure(error: BaseException) -> str:
    """Return a clause: the master does not answer, answers with an error, or refuses."""
    if is_unreachable(error):
        return UNREACHABLE
    return "the master answers with an error" if _is_internal(error) else "the master refuses"


def describe_request(error: BaseException) -> str:
    """Return why a request to the master failed."""
    return f"{describe_failure(error)}: {describe_error(error)}"


def describe_error(error: BaseException) -> str:
    """Return the reason of a failed request, without the repr of library objects."""
    if type(error).__name__ == "JSONDecodeError":
        return "the answer is not JSON, but perhaps a web page"
    link, visited = error, {id(error)}
    while True:
        # urllib3 keeps the cause as `reason`, requests as the first argument.
        cause = getattr(link, "reason", None) or next(iter(link.args), None)
        cause = cause if isinstance(cause, BaseException) else link.__cause__ or link.__context__
        if not isinstance(cause, BaseException) or id(cause) in visited:
            break
        link = cause
        visited.add(id(link))
    if isinstance(link, OSError) and link.strerror:
        return link.strerror.lower()
    if isinstance(link, TimeoutError) or "imeout" in type(link).__name__:
        return "no answer in time"
    text = str(link).strip().splitlines() or [""]
    status = getattr(error, "status_code", None)
    if status in _GATEWAY or (status and text[0][:1] in ("", "<")):
        return f"status {status}"
    return _OBJECT.sub("", text[0]).strip() or type(link).__name__
