"""Ends a search on a cluster whose runner is gone, from inside one of its trials.

Only the search runner closes trials and shuts their experiment down. When it is killed, or fails
more often than it may be restarted, nobody does, and the master waits for ever. So the chief of
each trial looks after the runner, and after its own report stays until it is closed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

_EVERY_S = 10.0
_LONGEST_STAY_S = 300.0
_STAY_LOOKS_EVERY_S = 0.5
_GONE = ("CANCELED", "ERROR", "DELETED")
_RESTS = ("PAUSED", *_GONE)  # a runner that will not close a trial soon
_OPEN = ("ACTIVE", "QUEUED", "PULLING", "STARTING", "RUNNING")

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Cluster(Protocol):
    """Requests to the master; each may raise an `OSError`."""

    def experiment_state(self, experiment_id: int) -> str:
        """`RUNNING`, `PAUSED`, `STOPPING_CANCELED` and so on; `DELETED` if there is none."""
        ...

    def trial_state(self, trial_id: int) -> str:
        """The same of a trial."""
        ...

    def kill_experiment(self, experiment_id: int) -> None:
        """Ends an experiment with its trials, this one included."""
        ...


class RunnerWatch:
    """Looks after the search runner of a trial.

    Args:
        cluster: the master.
        runner_id: of the runner's experiment.
        experiment_id, trial_id: of this trial.
        say: prints a line into the trial's log.
        every_s: between two looks, in seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        runner_id: int,
        experiment_id: int,
        trial_id: int,
        say: Callable[[str], None],
        every_s: float = _EVERY_S,
    ) -> None:
        self._cluster = cluster
        self._runner_id = runner_id
        self._experiment_id = experiment_id
        self._trial_id = trial_id
        self._say = say
        self._every_s = every_s
        self._lock = threading.Lock()
        self._told = False
        self._ended = False

    def start(self) -> None:
        """Looks now and then, beside the training."""
        threading.Thread(target=self._run, name="runner-watch", daemon=True).start()

    def look(self) -> str:
        """The runner's state, empty if nobody can tell; ends the experiment if it is gone."""
        state = self._asked(lambda: self._cluster.experiment_state(self._runner_id))
        if state in _GONE:
            self._end(state)
        return state

    def stay_until_closed(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Waits, after the trial's report, until it is closed, or that will not be soon."""
        began_s = clock()
        next_look_s = began_s + self._every_s
        while clock() - began_s < _LONGEST_STAY_S:
            state = self._asked(lambda: self._cluster.trial_state(self._trial_id))
            if state and state not in _OPEN:
                return
            if clock() >= next_look_s:
                next_look_s += self._every_s
                if self.look() in _RESTS:
                    return
            sleep(_STAY_LOOKS_EVERY_S)

    def _run(self) -> None:
        while self.look() not in _GONE or not self._ended:
            time.sleep(self._every_s)

    def _end(self, state: str) -> None:
        with self._lock:
            if self._ended:
                return
            if not self._told:
                self._told = True
                self._say(
                    f"the search runner, experiment {self._runner_id}, is gone ({state.lower()}): "
                    f"ending experiment {self._experiment_id}, whose trials nobody would close"
                )

            def kill() -> str:
                self._cluster.kill_experiment(self._experiment_id)
                return "done"

            self._ended = bool(self._asked(kill))

    def _asked(self, ask: Callable[[], str]) -> str:
        """An answer of the master; empty while there is none."""
        try:
            return ask()
        except OSError as error:
            _log.info("the master does not answer (%s)", error)
            return ""


class Master:
    """The master through determined's client, as the user that the trial runs for.

    Args:
        session: of `determined.common.api`.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    @classmethod
    def of_this_container(cls) -> Master:
        """Raises an `OSError` if it cannot be asked."""
        if "DET_USER_TOKEN" not in os.environ:  # without it determined would ask for a password
            raise OSError("DET_USER_TOKEN is not set")
        with warnings.catch_warnings():  # determined's, of its own parts
            warnings.simplefilter("ignore")
            from determined.experimental import Determined
        return cls(_with_os_errors(lambda: Determined()._session))

    def experiment_state(self, experiment_id: int) -> str:
        from determined.common.api import bindings, errors

        def ask() -> str:
            try:
                answer = bindings.get_GetExperiment(self._session, experimentId=experiment_id)
            except errors.NotFoundException:
                return "DELETED"
            return _name_of(answer.experiment.state)

        return _with_os_errors(ask)

    def trial_state(self, trial_id: int) -> str:
        from determined.common.api import bindings

        return _with_os_errors(
            lambda: _name_of(bindings.get_GetTrial(self._session, trialId=trial_id).trial.state)
        )

    def kill_experiment(self, experiment_id: int) -> None:
        from determined.common.api import bindings

        _with_os_errors(lambda: bindings.post_KillExperiment(self._session, id=experiment_id))


def _name_of(state: Any) -> str:
    return str(state.value).removeprefix("STATE_")


def _with_os_errors(ask: Callable[[], T]) -> T:
    """Return the answer to a request; determined's own errors become an `OSError`."""
    from determined.common.api import errors

    try:
        return ask()
    except (errors.APIException, errors.BadRequestException) as error:
        raise OSError(str(error)) from error


def start(runner_id: int) -> RunnerWatch | None:
    """Looks after the runner of the trial that this process is the chief of.

    Returns:
        The watch; None if the master cannot be asked.
    """
    import determined

    info = determined.get_cluster_info()
    assert info is not None
    try:
        master = Master.of_this_container()
    except OSError as error:
        _log.warning("nobody looks after the search runner: %s", error)
        return None
    watch = RunnerWatch(
        master,
        runner_id=runner_id,
        experiment_id=info.trial.experiment_id,
        trial_id=info.trial.trial_id,
        say=lambda line: print(f"[dsat] {line}", flush=True),
    )
    watch.start()
    return watch
