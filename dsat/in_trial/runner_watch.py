"""Watch of the search runner, from inside one of its trials on a cluster.

Only the search runner closes trials and ends the experiment; without it, the master waits forever.
So the chief of each trial polls the runner, and after its report waits until the trial is closed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from dataclasses import dataclass
from typing import Any

_EVERY_S = 10.0
_LONGEST_STAY_S = 300.0
_STAY_LOOKS_EVERY_S = 0.5
_GONE = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
_RESTS = ("PAUSED", *_GONE)  # states of a runner that will not close a trial soon
_OPEN = ("ACTIVE", "QUEUED", "PULLING", "STARTING", "RUNNING")

_log = logging.getLogger(__name__)


@dataclass
class RunnerWatch:
    """Watch of a trial's search runner, which is also an experiment, through a `Master`."""

    master: Any
    runner_id: int
    experiment_id: int
    trial_id: int

    def look(self) -> str:
        """Return the runner's state, empty if unknown; end the experiment if the runner is gone."""
        try:
            state = str(self.master.experiment_state(self.runner_id))
            if state in _GONE:
                print(
                    f"[dsat] the search runner, experiment {self.runner_id}, is gone "
                    f"({state.lower()}): ending experiment {self.experiment_id}, whose trials "
                    "would otherwise run on",
                    flush=True,
                )
                self.master.kill_experiment(self.experiment_id)
        except OSError as error:
            _log.info("the master does not answer (%s)", error)
            return ""
        return state

    def stay_until_closed(self) -> None:
        """Wait until the trial is closed or the runner is paused or gone, but at most 5 minutes."""
        began_s = time.monotonic()
        next_look_s = began_s + _EVERY_S
        while time.monotonic() - began_s < _LONGEST_STAY_S and not self._is_closed():
            if time.monotonic() >= next_look_s:
                next_look_s += _EVERY_S
                if self.look() in _RESTS:
                    return
            time.sleep(_STAY_LOOKS_EVERY_S)

    def _is_closed(self) -> bool:
        try:
            return self.master.trial_state(self.trial_id) not in _OPEN
        except OSError as error:
            _log.info("the master does not answer (%s)", error)
            return False

    def run(self) -> None:
        """Poll the runner periodically, until it is gone."""
        while self.look() not in _GONE:
            time.sleep(_EVERY_S)


class Master:
    """Client of Determined's master, with the rights of the trial's user.

    The constructor and each request may raise an `OSError`.
    """

    def __init__(self) -> None:
        if "DET_USER_TOKEN" not in os.environ:  # without it determined would ask for a password
            raise OSError("DET_USER_TOKEN is not set")
        with warnings.catch_warnings():  # determined warns about its own modules
            warnings.simplefilter("ignore")
            from determined.common.api import bindings, errors
            from determined.experimental import Determined
        self._bindings, self._errors = bindings, errors
        try:
            self._session = Determined()._session
        except (errors.APIException, errors.BadRequestException) as error:
            raise OSError(str(error)) from error

    def experiment_state(self, experiment_id: int) -> str:
        """Return the state (`RUNNING`, `STOPPING_CANCELED`, ...); `DELETED` if there is none."""
        found = self._ask(self._bindings.get_GetExperiment, experimentId=experiment_id)
        return "DELETED" if found is None else _name_of(found.experiment.state)

    def trial_state(self, trial_id: int) -> str:
        found = self._ask(self._bindings.get_GetTrial, trialId=trial_id)
        return "DELETED" if found is None else _name_of(found.trial.state)

    def kill_experiment(self, experiment_id: int) -> None:
        self._ask(self._bindings.post_KillExperiment, id=experiment_id)

    def _ask(self, request: Any, **of: int) -> Any:
        """Return the answer to a request; None if the object does not exist."""
        try:
            return request(self._session, **of)
        except self._errors.NotFoundException:
            return None
        except (self._errors.APIException, self._errors.BadRequestException) as error:
            raise OSError(str(error)) from error


def _name_of(state: Any) -> str:
    return str(state.value).removeprefix("STATE_")


def start(runner_id: int) -> RunnerWatch | None:
    """Start to watch the search runner, in the chief of a trial; return the watch.

    Return None if the master cannot be reached, or refuses the client.
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
    threading.Thread(target=watch.run, name="runner-watch", daemon=True).start()
    return watch
