"""A trial: its state, changed by the searcher, the user and the end of its allocation.

Follows `master/internal/trial.go`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from testing.master.allocation import Allocation, Exit
from testing.master.states import END_OF, TRIAL_DEGRADES, State

if TYPE_CHECKING:
    from testing.master.cluster import Cluster

ERRORED = "EXITED_REASON_UNSPECIFIED"
USER_CANCELED = "EXITED_REASON_USER_CANCELED"
INVALID_HP = "EXITED_REASON_INVALID_HP"

INVALID_HP_KILL_DELAY_S = 10.0


@dataclass
class SearcherState:
    """State of a trial's operation in the searcher.

    Attributes:
        length: Length of the last `ValidateAfter`.
        complete: Whether that operation is complete; True before the first one.
        closed: No further operation will come.
    """

    length: int = 0
    complete: bool = True
    closed: bool = False


@dataclass
class Trial:
    """One trial of an experiment.

    Attributes:
        restarts: Number of failures.
        run_id: Number of times it requested slots, for any reason.
        on_end: Called with the reason of an early exit, or None.
    """

    id: int
    request_id: str
    experiment_id: int
    task_id: str
    hparams: Mapping[str, Any]
    seed: int
    max_restarts: int
    host: Cluster
    on_end: Callable[[str | None], None]
    state: State
    searcher: SearcherState = field(default_factory=SearcherState)
    restarts: int = 0
    run_id: int = 0
    allocation: Allocation | None = None
    _invalid_hp: bool = False

    def searcher_changed(self) -> None:
        """React to new operations: request slots, or stop if the trial is closed."""
        if not self.searcher.complete:
            self.maybe_allocate()
        elif self.searcher.closed:
            self.patch(State.STOPPING_COMPLETED, "hp search is finished")

    def report_invalid_hp(self) -> None:
        """Record that the script rejected its hyperparameters; kill it if it does not exit in
        time."""
        self._invalid_hp = True
        self.host.later(
            INVALID_HP_KILL_DELAY_S,
            lambda: self.patch(State.STOPPING_KILLED, "timeout after user initiated early exit"),
        )

    def patch(self, state: State, reason: str) -> None:
        """Move to a state that the user, the searcher or the experiment requests, if that is
        allowed."""
        stronger = not self.state.is_stopping or state in TRIAL_DEGRADES[self.state]
        if self.state.is_terminal or state.is_terminal:
            return
        if state is self.state or stronger:
            self._move(state, reason)

    def maybe_allocate(self) -> None:
        idle = self.allocation is None and self.state is State.ACTIVE
        if not idle or self.searcher.complete:
            return
        self.run_id += 1
        self.allocation = self.host.allocate(self, self._allocation_ended)

    def _move(self, state: State, reason: str) -> None:
        self.state = state
        if state is State.ACTIVE:
            self.maybe_allocate()
        elif state is State.PAUSED:
            if self.allocation is not None:
                self.allocation.terminate(reason)
        elif state.is_stopping:
            self._stop(reason)
        elif state is State.ERROR:
            self.on_end(ERRORED)
        elif state is State.CANCELED:
            self.on_end(USER_CANCELED)
        else:
            self.on_end(None)

    def _stop(self, reason: str) -> None:
        if self.allocation is None:
            self._move(END_OF[self.state], reason)
        elif self.state in (State.STOPPING_KILLED, State.STOPPING_ERROR):
            self.allocation.kill(reason)
        else:
            self.allocation.terminate(reason)

    def _allocation_ended(self, end: Exit) -> None:
        self.allocation = None
        if self.state.is_stopping:
            self._move(State.ERROR if end.failure else END_OF[self.state], end.reason)
        elif self.searcher.complete and self.searcher.closed:
            self._move(State.ERROR if end.failure else State.COMPLETED, end.reason)
        elif end.failure:
            self.restarts += 1
            if self.restarts > self.max_restarts:
                self._move(State.ERROR, "trial exceeded max restarts")
            else:
                self.maybe_allocate()
        elif end.user_requested_stop or self._invalid_hp:
            self._move(State.COMPLETED, end.reason)
        else:
            self.maybe_allocate()
