"""Events of a journal: their names, the types of their values, and their decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dsat.errors import JournalError, UserInputError
from dsat.memory.predictor import Basis
from dsat.space.plan import Plan
from dsat.values.codec import DecodeError, decode
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial

EVENT_START = "start"
EVENT_EARLIER = "earlier"  # a trial that an earlier run has measured
EVENT_PROPOSED = "proposed"
EVENT_FINISHED = "finished"
EVENT_STOPPED = "stopped"
EVENT_BUDGET = "budget"
EVENT_PAUSED = "paused"  # the user interrupted the run
EVENT_MEMORY_BASIS = "foreseen"  # the name in journals of all versions
EVENT_FINALS = "finals"
_BUDGET = "the budget of"  # how `budget_reason` begins in journals of all versions

# Required values of events.
VALUES_OF: Mapping[str, Mapping[str, Any]] = {
    EVENT_START: {"plan": Plan, "info": Mapping[str, Any]},
    EVENT_EARLIER: {"trial": Trial, "outcome": Outcome, "neighbours": int},
    EVENT_PROPOSED: {"trial": Trial},
    EVENT_FINISHED: {"trial_id": int, "outcome": Outcome},
    EVENT_MEMORY_BASIS: {"basis": Basis},
    EVENT_FINALS: {
        "reason": str,
        "trials": int,
        "indifference": float,
        "leaders": list[int],
        "same_batch": list[int],
    },
    EVENT_BUDGET: {"max_trials": int},
    EVENT_PAUSED: {},
    EVENT_STOPPED: {"reason": str},
}
# Optional values of any event. `time_s` is a date, in seconds since the epoch; earlier versions did
# not write it. `converged`, `reserves`, `least_gain`, `first_look` and `most_failures` belong to
# finals. Earlier versions did not write these: they judged finals from the second pair on, replaced
# a pick at its first failure, and wrote `converged` into the event of a new budget.
_VALUES_OF_ALL: Mapping[str, Any] = {
    "elapsed_s": float,
    "time_s": float,
    "converged": bool,
    "reserves": list[int],
    "least_gain": float,
    "first_look": int,
    "most_failures": int,
    "finals": int | None,
    "indifference": float,
}
# Fields of a plan that a resumed run may change; earlier versions wrote only the first.
OF_A_BUDGET = ("max_trials", "finals", "indifference")
# Errors from events that do not fit earlier ones; `AttributeError` if the run has no plan yet.
_CONTRADICTIONS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_TIMES_S = range(253_402_214_400)  # valid dates, up to a day before the year 10000


def budget_reason(max_trials: int) -> str:
    """Return the stop reason of a search that has used all its trials."""
    return f"{_BUDGET} {max_trials} trials leaves no more for the search"


def is_of_budget(reason: str | None) -> bool:
    """Return whether a search ended for `budget_reason`."""
    return reason is not None and reason.startswith(_BUDGET)


def event_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Decode the event in a line of a journal; the inverse of `encode`.

    Raises:
        DecodeError: a value is missing or invalid.
    """
    kinds = VALUES_OF.get(decode(str, line["event"], "event"), {})
    values = dict(line)
    for key, kind in {**kinds, **_VALUES_OF_ALL}.items():
        if key in line:
            values[key] = decode(kind, line[key], key)
        elif key in kinds:
            raise DecodeError(key, "is missing")
    if not _TIMES_S.start <= values.get("time_s", 0) < _TIMES_S.stop:
        raise DecodeError("time_s", f"is not a date: {values['time_s']}")
    return values


def replay(
    lines: Iterable[Mapping[str, Any]],
    apply: Callable[[dict[str, Any]], None],
    name: str = "the journal",
) -> None:
    """Decode the events of a journal and apply them in order.

    Raises:
        JournalError: a value is damaged, or the event does not fit those before it.
    """
    for number, line in enumerate(lines, start=1):
        try:
            apply(event_of(line))
        except (UserInputError, *_CONTRADICTIONS) as error:
            problem = f"contradicts earlier lines ({type(error).__name__}: {error})"
            if isinstance(error, DecodeError):
                problem = f"is damaged: {error}"
            raise JournalError(
                f"line {number} of {name} {problem}. Start a new run, or restore a backup."
            ) from error
