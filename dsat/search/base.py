"""The interface of searches: a function of the observations proposes the next trial."""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from dsat.options import POSITIVE_NUMBER, Option, at_least, search_option
from dsat.space.locate import Point
from dsat.space.space import Space
from dsat.values.objective import Objective
from dsat.values.outcome import ModelProfile, Outcome
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import Strategy

EXHAUSTED = "every configuration was tried"
RANGE_FACTOR = search_option(
    "--search-range-factor",
    "search up to the largest micro batch that is predicted to fit, times X; by default up to "
    "where more samples are no longer faster",
    kind=POSITIVE_NUMBER,
)


def early_stopping(help: str) -> Option:
    """Return an option `--early-stopping N`."""
    return search_option("--early-stopping", help, kind=at_least(1))


NO_NEW_BEST = early_stopping("end the search after N trials without a new best")


class Source(enum.Enum):
    """Purpose of a measurement."""

    BASELINE = "baseline"
    SEARCH = "search"
    FINAL = "final"
    EARLIER_RUN = "earlier run"


@dataclass(frozen=True)
class Observation:
    """A configuration that was measured, or is being measured.

    Attributes:
        point: point in the space, or the nearest one; None if its strategy is not searched.
        outcome: how the trial ended; None while it runs.
        is_exact: whether it is `point` itself; otherwise a setting or a batch size differs.
        is_admitted: whether its batch sizes keep to the user's constraints.
        neighbours: largest number of trials that ran on the machine at the same time.
        arm: number that the search gave to its settings; None if the search did not propose it.
        note: facts that the search recorded with it, such as its rung.
    """

    point: Point | None
    batch: BatchTriple
    outcome: Outcome | None
    source: Source = Source.SEARCH
    is_exact: bool = True
    is_admitted: bool = True
    neighbours: int = 0
    arm: int | None = None
    note: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Proposal:
    """The next configuration to try.

    Attributes:
        arm: number of its settings among those that the search has tried; see `Observation`.
        note: facts for later decisions, recorded with the trial.
    """

    point: Point
    arm: int | None = None
    note: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Wait:
    """Nothing to try before a running trial ends."""


@dataclass(frozen=True)
class Stop:
    """End of the search, with its reason."""

    reason: str = EXHAUSTED


Decision = Proposal | Wait | Stop


class Costs(Protocol):
    """Predicted durations of trials."""

    def trial_s(self, step_s: Any) -> Any:
        """Return the seconds of whole trials for seconds of their steps (also an array)."""

    @property
    def left_s(self) -> float:
        """Seconds that the search may still take."""

    def are_too_long(self, step_s: Any) -> Any:
        """Return which trials would exceed the time limit, for seconds of their steps."""

    def are_unaffordable(self, step_s: Any) -> Any:
        """Return which trials cost more than a verdict may, for seconds of their steps."""

    def step_s(self, strategy: Strategy, batch: BatchTriple) -> float:
        """Return a lower bound of the seconds of a step; 0 if unknown."""


class Memory(Protocol):
    """Predicted memory of configurations."""

    def largest(self, settings: Mapping[str, Any]) -> float:
        """Return the largest micro batch that fits with some settings; 0 if none does."""

    def fits(self, settings: Mapping[str, Any], micro_batch: int) -> bool:
        """Return whether a configuration may be launched."""


@dataclass(frozen=True)
class Context:
    """Predictions that a search may use beside the observations; None if nothing is known."""

    memory: Memory | None = None
    costs: Costs | None = None


@dataclass(frozen=True)
class Problem:
    """Definition of a search: model, metric, space and seed.

    Attributes:
        ramp: raise micro batches step by step, as long as more samples are faster.
    """

    profile: ModelProfile
    objective: Objective
    space: Space
    seed: int = 0
    ramp: bool = False


class Search(abc.ABC):
    """Base class of all searches.

    A search has no clock, no files and no global random numbers. It decides by its arguments alone:
    what it keeps between calls only saves time. So a run continues in another process, on another
    machine, by the observations in its journal.

    Attributes:
        summary: one line for `--help`.
        options: its own options, by the parameters of its constructor that take their values.
        ramps: it uses `Problem.ramp`.
        needs_time: it predicts times, so the metric must be a time, or work over time.
    """

    summary: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Option]] = {}
    ramps: ClassVar[bool] = False
    needs_time: ClassVar[bool] = False

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def propose(self, observations: Sequence[Observation], context: Context) -> Decision:
        """Return the next configuration to try, as if it began at once.

        Args:
            observations: all trials, in the order in which they began.

        Returns:
            A point that is none of the exact observations, or why there is none.
        """

    def predicted(self, point: Point) -> float | None:
        """Return the predicted logarithm of a value, up to a constant; larger is better.

        Searches without a model of speed return the same for all points. None if the model does not
        know the point.
        """
        return 0.0


def stop_without_new_best(
    patience: int | None, observations: Sequence[Observation], objective: Objective
) -> Stop | None:
    """Stop a search without a new best in its last trials; finals do not count.

    Args:
        patience: number of trials without a new best; None for no limit.
    """
    if patience is None:
        return None
    trials = (each for each in observations if each.source is not Source.FINAL)
    best, since = count_since_best(trials, objective)
    if best is None or since < patience:
        return None
    return Stop(f"no better configuration in the last {since} trials")


def count_since_best(
    observations: Iterable[Observation], objective: Objective
) -> tuple[float | None, int]:
    """Return the best value, None if there is none, and the number of finished trials since."""
    best, since = None, 0
    for each in observations:
        if each.outcome is None:
            continue
        value = each.outcome.value(objective)
        if value is not None and each.is_admitted and objective.is_better(value, best):
            best, since = value, 0
        else:
            since += 1
    return best, since


def largest_micro_batch(
    problem: Problem, memory: Memory | None, settings: Mapping[str, Any]
) -> float:
    """Return the largest micro batch that settings should allow; 0 if none.

    Without predictions, the memory that activations take decides.
    """
    profile = problem.profile
    if memory is not None:
        found = memory.largest(settings)
    else:
        found = profile.slot_memory_bytes // max(1, profile.activation_bytes_per_sample)
    return min(found, 2.0 * problem.space.micro_batches[-1])
