"""The master, as the search runner sees it through determined's client."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from determined.common.api import errors
from determined.experimental import client

from dsat.determined_cluster.retry import retry_while_unreachable
from dsat.in_trial.cluster_rank import LOG_MARK
from dsat.inputs.ds_config import DSAT_TRIAL_KEY

LOG_LINES = 400
_MARKS = "[dsat-"
_LATE_LOGS_S = (0.5, 1.0, 2.0)  # the last lines may come after the news of the trial's end


class RemoteCluster:
    """The custom experiment's trials, by dsat's numbers.

    Args:
        say: prints a line.
        sleep: waits for so many seconds.

    Attributes:
        experiment_id: of the custom experiment, once there is one.
    """

    experiment_id: int | None = None

    def __init__(
        self, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._say = say
        self._sleep = sleep

    def log(self, trial_id: int) -> Sequence[str]:
        def read() -> list[str]:
            trial = self._trial(trial_id)
            if trial is None:
                return []
            # What dsat itself wrote may stand far above the end.
            ours = trial.iter_logs(search_text=_MARKS)
            return [*ours, *trial.iter_logs(tail=LOG_LINES)]

        lines = retry_while_unreachable(read, self._say)
        for pause_s in _LATE_LOGS_S:
            if any(LOG_MARK in line for line in lines):
                break
            self._sleep(pause_s)
            lines = retry_while_unreachable(read, self._say)
        return lines

    def on_slots_s(self, trial_id: int) -> float:
        def read() -> float:
            from determined.common.api import bindings

            trial = self._trial(trial_id)
            if trial is None:
                return 0.0
            answer = bindings.get_GetTrial(trial._session, trialId=trial.id)
            return answer.trial.wallClockTime or 0.0

        return retry_while_unreachable(read, self._say)

    def kill(self, trial_id: int) -> None:
        trial = retry_while_unreachable(lambda: self._trial(trial_id), self._say)
        if trial is not None:
            retry_while_unreachable(trial.kill, self._say)

    def _trial(self, trial_id: int) -> Any:
        assert self.experiment_id is not None
        experiment = client.get_experiment(self.experiment_id)
        for trial in experiment.iter_trials():
            named = (trial.hparams or {}).get(DSAT_TRIAL_KEY)
            if isinstance(named, Mapping) and named.get("id") == trial_id:
                return trial
        return None


def submitted_config(experiment_id: int) -> dict[str, Any]:
    """An experiment's configuration as it was submitted, the cluster's defaults not filled in."""
    import yaml
    from determined.common.api import bindings

    found = client.get_experiment(experiment_id)
    session = found._session
    answer = bindings.get_GetExperiment(session, experimentId=experiment_id)
    config = yaml.safe_load(answer.experiment.originalConfig)
    return dict(config or {})


def find_or_create(
    tag: str,
    config: Mapping[str, Any],
    model_dir: Path,
    includes: Sequence[Path],
    say: Callable[[str], None],
) -> int:
    """The experiment whose description begins with a tag; made if there is none.

    A runner that died between making an experiment and noting its id must not make a second one;
    neither must one whose request was answered by a dropped connection.
    """

    def attempt() -> int:
        known = _find(tag)
        if known is not None:
            return known
        with contextlib.redirect_stdout(io.StringIO()):  # determined draws a progress bar
            made = client.create_experiment(dict(config), str(model_dir), list(map(str, includes)))
        return int(made.id)

    return retry_while_unreachable(attempt, say)


def _find(tag: str) -> int | None:
    from determined.common.api import bindings

    client._require_singleton(lambda: None)()
    session = client._determined._session
    offset = 0
    while True:
        page = bindings.get_GetExperiments(session, description=tag, offset=offset, limit=100)
        for experiment in page.experiments:
            if (experiment.description or "").startswith(tag):
                return int(experiment.id)
        offset += len(page.experiments)
        if not page.experiments or offset >= (page.pagination.total or 0):
            return None


def experiment_state(experiment_id: int) -> str:
    """`ACTIVE`, `PAUSED`, `STOPPING_CANCELED` and so on."""
    from determined.common.api import bindings

    session = client.get_experiment(experiment_id)._session
    answer = bindings.get_GetExperiment(session, experimentId=experiment_id)
    return str(answer.experiment.state.value).removeprefix("STATE_")


def cancel_experiment(experiment_id: int) -> None:
    """Ends an experiment; does nothing if it is over."""
    try:
        client.get_experiment(experiment_id).kill()
    except errors.NotFoundException:
        return


def describe(experiment_id: int, text: str) -> None:
    """Gives an experiment a description."""
    client.get_experiment(experiment_id).set_description(text)
