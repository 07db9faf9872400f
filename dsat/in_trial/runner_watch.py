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
from collections.abc import Callable
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
    """Watch of a trial's search runner, which is also an experiment.

    `ask` is the result of `connect`.
    """

    ask: Callable[..., Any]
    runner_id: int
    experiment_id: int
    trial_id: int

    def look(self) -> str:
        """Return the runner's state (`RUNNING`, `STOPPING_CANCELED`, ...); empty if unknown.

        End the experiment if the runner is gone.
        """
        try:
            answer = self.ask("get_GetExperiment", experimentId=self.runner_id)
            state = "DELETED" if answer is None else _name_of(answer.experiment.state)
            if state in _GONE:
                print(
                    f"[dsat] the search runner, experiment {self.runner_id}, is gone "
                    f"({state.lower()}): ending experiment {self.experiment_id}, whose trials "
                    "would otherwise continue",
                    flush=True,
                )
                self.ask("post_KillExperiment", id=self.experiment_id)
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
            answer = self.ask("get_GetTrial", trialId=self.trial_id)
            return answer is None or _name_of(answer.trial.state) not in _OPEN
        except OSError as error:
            _log.info("the master does not answer (%s)", error)
            return False

    def run(self) -> None:
        """Poll the runner periodically, until it is gone."""
        while self.look() not in _GONE:
            time.sleep(_EVERY_S)


def connect() -> Callable[..., Any]:
    """Connect to Determined's master with the rights of the trial's user.

    Returns:
        A function that sends a request, given by its name in determined's `bindings` and its
        parameters. It returns the answer, or None if the object does not exist.

    Raises:
        OSError: the master does not answer or refuses; also raised by the returned function.
    """
    if "DET_USER_TOKEN" not in os.environ:  # without it determined would ask for a password
        raise OSError("DET_USER_TOKEN is not set")
    with warnings.catch_warnings():  # determined warns about its own modules
        warnings.simplefilter("ignore")
        from determined.common.api import bindings, errors
        from determined.experimental import Determined

    def ask(request: str, **of: int) -> Any:
        try:
            return getattr(bindings, request)(session, **of)
        except errors.NotFoundException:
            return None
        except (errors.APIException, errors.BadRequestException) as error:
            raise OSError(str(error)) from error

    try:
        session = Determined()._session
    except (errors.APIException, errors.BadRequestException) as error:
        raise OSError(str(error)) from error
    return ask


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
        ask = connect()
    except OSError as error:
        _log.warning("cannot check whether the search runner is still running: %s", error)
        return None
    watch = RunnerWatch(ask, runner_id, info.trial.experiment_id, info.trial.trial_id)
    threading.Thread(target=watch.run, name="runner-watch", daemon=True).start()
    return watch
