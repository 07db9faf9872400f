"""End of a cluster's search whose runner is gone, from inside one of its trials.

Only the search runner closes trials and shuts their experiment down. Without it the master waits
for ever, so the chief of each trial looks at its state, and stays after its report until closed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

_EVERY_S = 10.0
_LONGEST_STAY_S = 300.0
_STAY_LOOKS_EVERY_S = 0.5
_GONE = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
_RESTS = ("PAUSED", *_GONE)  # a runner that will not close a trial soon
_OPEN = ("ACTIVE", "QUEUED", "PULLING", "STARTING", "RUNNING")

_log = logging.getLogger(__name__)


class RunnerWatch:
    """Watch of the search runner of a trial.

    Args:
        master: see `Master`.
        runner_id: of the runner's experiment.
        experiment_id, trial_id: of this trial.
        every_s: between two looks, in seconds.
    """

    def __init__(
        self,
        master: Any,
        *,
        runner_id: int,
        experiment_id: int,
        trial_id: int,
        every_s: float = _EVERY_S,
    ) -> None:
        self._master = master
        self._runner_id = runner_id
        self._experiment_id = experiment_id
        self._trial_id = trial_id
        self._every_s = every_s

    def start(self) -> None:
        """Poll the runner periodically in a thread."""
        threading.Thread(target=self._run, name="runner-watch", daemon=True).start()

    def look(self) -> str:
        """Return the runner's state, empty if it is unknown; end the experiment if it is gone."""
        try:
            state = str(self._master.experiment_state(self._runner_id))
            if state in _GONE:
                print(
                    f"[dsat] the search runner, experiment {self._runner_id}, is gone "
                    f"({state.lower()}): ending experiment {self._experiment_id}, whose trials "
                    "would otherwise run on",
                    flush=True,
                )
                self._master.kill_experiment(self._experiment_id)
        except OSError as error:
            _log.info("the master does not answer (%s)", error)
            return ""
        return state

    def stay_until_closed(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Wait, after the trial's report, until it is closed, or that will not be soon."""
        began_s = clock()
        next_look_s = began_s + self._every_s
        while clock() - began_s < _LONGEST_STAY_S and not self._is_closed():
            if clock() >= next_look_s:
                next_look_s += self._every_s
                if self.look() in _RESTS:
                    return
            sleep(_STAY_LOOKS_EVERY_S)

    def _is_closed(self) -> bool:
        try:
            return self._master.trial_state(self._trial_id) not in _OPEN
        except OSError as error:
            _log.info("the master does not answer (%s)", error)
            return False

    def _run(self) -> None:
        while self.look() not in _GONE:
            time.sleep(self._every_s)


class Master:
    """The master through determined's client, as the user that the trial runs for.

    Each request may raise an `OSError`.
    """

    def __init__(self) -> None:
        if "DET_USER_TOKEN" not in os.environ:  # without it determined would ask for a password
            raise OSError("DET_USER_TOKEN is not set")
        with warnings.catch_warnings():  # determined's, of its own parts
            warnings.simplefilter("ignore")
            from determined.experimental import Determined
        self._session = _with_os_errors(lambda: Determined()._session)

    def experiment_state(self, experiment_id: int) -> str:
        """`RUNNING`, `PAUSED`, `STOPPING_CANCELED` and so on; `DELETED` if there is none."""
        from determined.common.api import bindings, errors

        def ask() -> str:
            try:
                answer = bindings.get_GetExperiment(self._session, experimentId=experiment_id)
            except errors.NotFoundException:
                return "DELETED"
            return _name_of(answer.experiment.state)

        return str(_with_os_errors(ask))

    def trial_state(self, trial_id: int) -> str:
        from determined.common.api import bindings

        answer = _with_os_errors(lambda: bindings.get_GetTrial(self._session, trialId=trial_id))
        return _name_of(answer.trial.state)

    def kill_experiment(self, experiment_id: int) -> None:
        from determined.common.api import bindings

        _with_os_errors(lambda: bindings.post_KillExperiment(self._session, id=experiment_id))


def _name_of(state: Any) -> str:
    return str(state.value).removeprefix("STATE_")


def _with_os_errors(ask: Callable[[], Any]) -> Any:
    """Return the answer to a request; determined's own errors become an `OSError`."""
    from determined.common.api import errors

    try:
        return ask()
    except (errors.APIException, errors.BadRequestException) as error:
        raise OSError(str(error)) from error


def start(runner_id: int) -> RunnerWatch | None:
    """Watch the runner of the trial that this process is the chief of.

    Returns:
        The watch; None if the master cannot be asked.
    """
    import determined

    info = determined.get_cluster_info()
    assert info is not None
    try:
        master = Master()
    except OSError as error:
        _log.warning("the search runner cannot be watched: %s", error)
        return None
    watch = RunnerWatch(
        master,
        runner_id=runner_id,
        experiment_id=info.trial.experiment_id,
        trial_id=info.trial.trial_id,
    )
    watch.start()
    return watch
