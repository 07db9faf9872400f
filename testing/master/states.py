"""The states of experiments and trials, with their transitions (master/pkg/model/experiment.go)."""

from __future__ import annotations

from enum import Enum


class State(str, Enum):
    """A state, with the value that the REST API uses."""

    ACTIVE = "STATE_ACTIVE"
    PAUSED = "STATE_PAUSED"
    STOPPING_COMPLETED = "STATE_STOPPING_COMPLETED"
    STOPPING_CANCELED = "STATE_STOPPING_CANCELED"
    STOPPING_KILLED = "STATE_STOPPING_KILLED"
    STOPPING_ERROR = "STATE_STOPPING_ERROR"
    COMPLETED = "STATE_COMPLETED"
    CANCELED = "STATE_CANCELED"
    ERROR = "STATE_ERROR"

    def __str__(self) -> str:
        return self.value

    @property
    def is_stopping(self) -> bool:
        return self in END_OF

    @property
    def is_terminal(self) -> bool:
        return self in (State.COMPLETED, State.CANCELED, State.ERROR)


END_OF = {
    State.STOPPING_COMPLETED: State.COMPLETED,
    State.STOPPING_CANCELED: State.CANCELED,
    State.STOPPING_KILLED: State.CANCELED,
    State.STOPPING_ERROR: State.ERROR,
}

EXPERIMENT_MOVES: dict[State, frozenset[State]] = {
    State.ACTIVE: frozenset({State.PAUSED, *END_OF}),
    State.PAUSED: frozenset({State.ACTIVE, *END_OF}),
    State.STOPPING_CANCELED: frozenset(
        {State.CANCELED, State.STOPPING_KILLED, State.STOPPING_ERROR}
    ),
    State.STOPPING_KILLED: frozenset({State.CANCELED, State.STOPPING_ERROR}),
    State.STOPPING_COMPLETED: frozenset({State.COMPLETED, State.STOPPING_ERROR}),
    State.STOPPING_ERROR: frozenset({State.ERROR}),
}

# A stopping trial may still be stopped in a more forceful way.
TRIAL_DEGRADES: dict[State, frozenset[State]] = {
    State.STOPPING_COMPLETED: frozenset(
        {State.STOPPING_CANCELED, State.STOPPING_KILLED, State.STOPPING_ERROR}
    ),
    State.STOPPING_CANCELED: frozenset({State.STOPPING_KILLED, State.STOPPING_ERROR}),
    State.STOPPING_KILLED: frozenset({State.STOPPING_ERROR}),
    State.STOPPING_ERROR: frozenset(),
}
