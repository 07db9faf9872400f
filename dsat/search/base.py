"""The interface of searches: a search proposes the next trial from the observations so far."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from dsat.options import POSITIVE_NUMBER, Option, at_least, search_option
from dsat.space.locate import Point
from dsat.space.space import Space
from dsat.values import format as fmt
from dsat.values.objective import Objective
from dsat.values.outcome import ModelProfile, Outcome
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import Strategy

EXHAUSTED = "every configuration was tried"
RANGE_FACTOR = search_option(
    "--search-range-factor",
    "search all micro batches from the start, up to X times the largest that is predicted to fit. "
    "Raise X above 1 if predictions of memory are too high (default: raise micro batches step by "
    "step, while more samples are faster)",
    kind=POSITIVE_NUMBER,
)


def early_stopping(help: str) -> Option:
    """Return an option `--early-stopping N`."""
    return search_option("--early-stopping", help, kind=at_least(1))


NO_NEW_BEST = early_stopping("end the search after N trials without a new best")


@dataclass(frozen=True)
class Observation:
    """A trial that ended or is running; trials of the finals are no observations.

    Attributes:
        point: the trial's point in the space, or the nearest one; None if its strategy is not
            searched.
        outcome: how the trial ended; None while it runs.
        is_exact: whether the trial ran with exactly the settings and batch sizes of `point`, which
            the search may choose.
        is_admitted: whether the search may choose its batch sizes (`BatchRule.admits`).
        neighbours: largest number of other trials at the same time; 0 until the trial ends.
        arm: the search's number for its settings; None if the search did not propose or number it.
        note: integers that the search recorded with the trial (`Proposal.note`).
    """

    point: Point | None
    batch: BatchTriple
    outcome: Outcome | None
    is_exact: bool = True
    is_admitted: bool = True
    neighbours: int = 0
    arm: int | None = None
    note: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Proposal:
    """The next configuration to try.

    Attributes:
        point: a point that no exact observation has; numpy's integers become Python's.
        arm: the search's number for its settings; None if the search does not number them.
        note: integers that later decisions need; they are recorded with the trial.
    """

    point: Point
    arm: int | None = None
    note: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Wait:
    """Decision to try nothing before a running trial ends."""


@dataclass(frozen=True)
class Stop:
    """End of the search, with its reason."""

    reason: str = EXHAUSTED


Decision = Proposal | Wait | Stop


class Costs(Protocol):
    """Predicted durations of trials."""

    def trial_s(self, step_s: Any) -> Any:
        """Return the seconds of a whole trial from the seconds of its step (numbers or arrays)."""

    @property
    def left_s(self) -> float:
        """Seconds that the search may still take."""

    def are_too_long(self, step_s: Any) -> Any:
        """Return which trials must not start, from the seconds of a step (numbers or arrays)."""

    def are_unaffordable(self, step_s: Any) -> Any:
        """Return which trials take longer than they are worth, from the seconds of a step."""

    def step_s(self, strategy: Strategy, batch: BatchTriple) -> float:
        """Return a low estimate of the seconds of a step; 0 if unknown."""


class Memory(Protocol):
    """Predicted memory of configurations."""

    def largest(self, settings: Mapping[str, Any]) -> float:
        """Return the largest micro batch that should fit with these settings; 0 if none does."""

    def fits(self, settings: Mapping[str, Any], micro_batch: int) -> bool:
        """Return whether memory predictions allow a configuration to be launched."""


@dataclass(frozen=True)
class Context:
    """Predictions that a search may use besides the observations; None if there are none."""

    memory: Memory | None = None
    costs: Costs | None = None


@dataclass(frozen=True)
class Problem:
    """Definition of a search: model, metric, space and seed.

    Attributes:
        profile: facts about the model and the devices.
        objective: the metric, and which of two values is better (`objective.is_better`).
        space: `branches` and `micro_batches` to search.
        seed: source of all random choices.
        ramp: raise micro batches step by step, while that increases the throughput.
    """

    profile: ModelProfile
    objective: Objective
    space: Space
    seed: int = 0
    ramp: bool = False


class Search(abc.ABC):
    """Base class of all searches.

    A search has no clock, no files and no global random numbers. `propose` depends on its arguments
    alone; state kept between calls only saves time. So a run can continue in another process or on
    another machine from the observations in its journal.

    Attributes:
        summary: one line for `--help`.
        options: options of this search only, keyed by the constructor parameter that each one sets.
        ramps: whether it uses `Problem.ramp`.
        needs_time: whether it predicts times, so that the metric must be a time or work per time.
    """

    summary: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Option]] = {}
    ramps: ClassVar[bool] = False
    needs_time: ClassVar[bool] = False

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def propose(self, observations: Sequence[Observation], context: Context) -> Decision:
        """Return the next configuration to try, assuming that its trial begins at once.

        Args:
            observations: all trials, in the order in which they began.

        Returns:
            A point that no exact observation has, or why there is none.
        """

    def predicted(self, point: Point) -> float | None:
        """Return the predicted logarithm of the objective, up to a constant; larger is better.

        By default it is the same for all points. A search with a model of speed returns None until
        it has fitted the model.
        """
        return 0.0


def stop_without_new_best(
    patience: int | None, observations: Sequence[Observation], objective: Objective
) -> Stop | None:
    """Return `Stop` if the last trials brought no new best, else None.

    Args:
        patience: number of trials without a new best after which to stop; None for no limit.
            Before any trial ran, there is no limit either.
    """
    if patience is None:
        return None
    best, since = count_since_best(observations, objective)
    if best is None or since < patience:
        return None
    return Stop(f"no better configuration in the last {fmt.count(since, 'trial')}")


def count_since_best(
    observations: Sequence[Observation], objective: Objective
) -> tuple[float | None, int]:
    """Return the best admitted value, and the number of trials that finished after it.

    The value is None if there is none; then all finished trials count.
    """
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
    """Return the largest micro batch that should fit with some settings; 0 if none does.

    Without `memory`, only activations count. The result is at most twice the largest allowed one.
    """
    profile = problem.profile
    if memory is not None:
        found = memory.largest(settings)
    else:
        found = profile.slot_memory_bytes // max(1, profile.activation_bytes_per_sample)
    return min(found, 2.0 * problem.space.micro_batches[-1])
