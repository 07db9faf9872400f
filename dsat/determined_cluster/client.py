"""The master, as the user's own machine sees it: logs in, submits the search, follows it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.determined_cluster import result
from dsat.determined_cluster.job import SAID, search_tag, state_in_words
from dsat.determined_cluster.result import RESULT_MARK
from dsat.determined_cluster.retry import in_words, retry_while_unreachable
from dsat.errors import EngineError, UserInputError

FIRST_WITHOUT = (0, 38)
LOCAL = "With --engine local dsat tunes on this machine's own accelerators."
_INTERVAL_S = 2.0
_LATE = 2  # how often more is asked for after the end
_OVER = ("COMPLETED", "CANCELED", "ERROR", "DELETED")


@dataclass(frozen=True)
class Ended:
    """How a search runner's experiment ended.

    Attributes:
        state: `COMPLETED`, `CANCELED`, `ERROR` or `DELETED`.
        result: what the runner said of its result, see `result.of_run`; empty if it said nothing.
    """

    state: str
    result: Mapping[str, Any]


def check_installed(master: str) -> None:
    """Raise UserInputError if determined, without which no master can be talked to, is missing."""
    if importlib.util.find_spec("determined") is None:
        raise UserInputError(
            "determined is not installed, and tuning on a cluster needs it",
            where=master,
            hint=f"Run pip install 'dsat[determined]'. {LOCAL}",
        )


def connect(master: str) -> Client:
    """Logs in to a master that can run custom searches.

    Raises:
        UserInputError: the address, the credentials or the version is not right.
        EngineError: the installed determined cannot run custom searches.
    """
    if not _has_searcher():
        raise EngineError(
            f"the installed determined has no custom searchers (0.28 to 0.37 have). {LOCAL}"
        )
    with _quietly():
        from determined.experimental import Determined

    with _explained(master):
        client = Client(Determined(master=master))
        version = client.version()
    if version is not None and version >= FIRST_WITHOUT:
        raise UserInputError(
            f"the master is Determined {'.'.join(map(str, version))}, and the custom "
            "searches by which dsat tunes on a cluster are gone since 0.38",
            where=client.address,
            hint=LOCAL,
        )
    return client


class Client:
    """A user's session with a master.

    Args:
        determined: determined's client, logged in.
    """

    def __init__(self, determined: Any) -> None:
        self._determined = determined

    @property
    def address(self) -> str:
        return str(self._determined._session.master)

    def url(self, experiment_id: int) -> str:
        """Of an experiment in the web UI."""
        return f"{self.address}/det/experiments/{experiment_id}"

    def version(self) -> tuple[int, int] | None:
        """Of the master; None if it does not say."""
        text = str(self._determined._session.get("/api/v1/master").json().get("version", ""))
        found = re.match(r"v?(\d+)\.(\d+)", text)
        return None if found is None else (int(found[1]), int(found[2]))

    def submit(self, config: Mapping[str, Any], folder: Path) -> int:
        """Makes an experiment; returns its id.

        Args:
            folder: its context.
        """
        with _explained(self.address), _quietly():
            made = self._determined.create_experiment(config=dict(config), model_dir=folder)
        return int(made.id)

    def follow(
        self,
        experiment_id: int,
        say: Callable[[str], None],
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Ended:
        """Prints what a search runner says, until its end."""
        shown, state, late = 0, "", 0
        while True:
            new = retry_while_unreachable(lambda: self._state(experiment_id), say)
            if new != state and new not in ("ACTIVE", *_OVER):
                say(f"experiment {experiment_id} is {state_in_words(new)}")
            state = new
            lines = retry_while_unreachable(lambda: self._said(experiment_id), say)
            for line in lines[shown:]:
                if not line.startswith(RESULT_MARK):
                    say(line)
            shown = max(shown, len(lines))
            found = result.of_lines(lines) if state in _OVER else {}
            # The last lines may come after the news of the end.
            if state in _OVER and (found or late >= _LATE):
                return Ended(state, found)
            late += state in _OVER
            sleep(_INTERVAL_S)

    def end_search_of(self, runner_id: int, say: Callable[[str], None]) -> int | None:
        """Ends the experiment of a search whose runner is gone, if it goes on; returns its id."""
        from determined.common.api import bindings

        session, tag = self._determined._session, search_tag(runner_id)

        def attempt() -> int | None:
            page = bindings.get_GetExperiments(session, description=tag, limit=100)
            for experiment in page.experiments:
                state = _name_of(experiment.state)
                goes_on = state not in _OVER and not state.startswith("STOPPING_")
                if (experiment.description or "").startswith(tag) and goes_on:
                    bindings.post_KillExperiment(session, id=experiment.id)
                    return int(experiment.id)
            return None

        with _explained(self.address):
            return retry_while_unreachable(attempt, say)

    def _state(self, experiment_id: int) -> str:
        from determined.common.api import bindings

        session = self._determined._session
        answer = bindings.get_GetExperiment(session, experimentId=experiment_id)
        return _name_of(answer.experiment.state)

    def _said(self, experiment_id: int) -> list[str]:
        lines = []
        for trial in self._determined.get_experiment(experiment_id).iter_trials():
            for message in trial.iter_logs(search_text=SAID.strip(" ]")):
                for line in message.splitlines():
                    found = [line.find(mark) for mark in (SAID, RESULT_MARK) if mark in line]
                    if found:
                        lines.append(line[min(found) :].removeprefix(SAID))
        return lines


def _name_of(state: Any) -> str:
    return str(state.value).removeprefix("STATE_")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without determined's progress bar, and without warnings about its own code."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextlib.contextmanager
def _explained(master: str) -> Iterator[None]:
    """Says in one line what determined has several ways to say."""
    from determined.common.api import errors

    try:
        yield
    except (errors.UnauthenticatedException, errors.ForbiddenException, EOFError) as error:
        raise UserInputError(
            "the master does not accept your credentials",
            where=master,
            hint=f"Log in with `det -m {master} user login USER`, or set DET_USER and DET_PASS.",
        ) from error
    except errors.APIException as error:
        raise UserInputError(f"the master refuses: {in_words(error)}", where=master) from error
    except (errors.BadRequestException, OSError) as error:
        raise UserInputError(
            "no Determined master answers there",
            where=master,
            hint=f"Check DET_MASTER. {LOCAL}",
        ) from error
    except (ValueError, KeyError) as error:
        raise UserInputError(
            "what answers there is no Determined master, or the address is none: "
            f"{in_words(error)}",
            where=master,
            hint=f"Check DET_MASTER. {LOCAL}",
        ) from error


def _has_searcher() -> bool:
    return importlib.util.find_spec("determined.searcher") is not None
