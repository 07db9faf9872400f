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
    "search all micro batches from the beginning, up to X times the largest predicted to fit. "
    "Use 1 for the predicted range, and more if the predicted memory is too high (default: raise "
    "micro batches step by step, while more samples are faster)",
    kind=POSITIVE_NUMBER,
)


def early_stopping(help: str) -> Option:
    """Return an option `--early-stopping N`."""
    return search_option("--early-stopping", help, kind=at_least(1))


NO_NEW_BEST = early_stopping("end the search after N trials without a new best")


@dataclass(frozen=True)
class Observation:
    """A finished or running trial that is not part of the finals.

    Attributes:
        point: the trial's point in the space, or the nearest one; None if its strategy is not
            searched.
        outcome: how the trial ended; None while it runs.
        is_exact: whether the trial has exactly the settings and batch sizes of `point`, and is
            admitted.
        is_admitted: whether the plan allows the trial's batch sizes (`BatchRule.admits`).
        neighbours: largest number of other trials at the same time; 0 until the trial ends.
        arm: the number that the search gave to the trial's settings; None if it gave none.
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
        point: a point that was not observed exactly; its integers may be numpy's.
        arm: the search's number for the settings; None if the search does not number them.
        note: integers that later decisions need; they are recorded with the trial.
    """

    point: Point
    arm: int | None = None
    note: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Wait:
    """Decision to wait until a running trial ends."""


@dataclass(frozen=True)
class Stop:
    """Decision to end the search, with the reason."""

    reason: str = EXHAUSTED


Decision = Proposal | Wait | Stop


class Costs(Protocol):
    """Predicted durations of trials. Seconds may be numbers or arrays."""

    def trial_s(self, step_s: Any) -> Any:
        """Return the seconds of a whole trial, given the seconds of an optimizer step."""

    @property
    def left_s(self) -> float:
        """Seconds that the search may still take."""

    def are_too_long(self, step_s: Any) -> Any:
        """Return whether each trial must not start, given its seconds per optimizer step."""

    def are_unaffordable(self, step_s: Any) -> Any:
        """Return whether each trial takes longer than it is worth, given its seconds per step."""

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
    """Predictions that a search may use besides the observations; None if unavailable."""

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
        ramps: whether the search uses `Problem.ramp`.
        needs_time: whether the search predicts times, so the metric must be a time or a rate.
    """

    summary: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Option]] = {}
    ramps: ClassVar[bool] = False
    needs_time: ClassVar[bool] = False

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def propose(self, observations: Sequence[Observation], context: Context) -> Decision:
        """Return the next configuration to try, whose trial will begin at once.

        Args:
            observations: all trials, in the order in which they began.

        Returns:
            A proposal of a point that was not observed exactly; otherwise `Wait` or `Stop`.
        """

    def predicted(self, point: Point) -> float | None:
        """Return the predicted logarithm of the objective, up to a constant; larger is better.

        By default, all points get the same value. A search with a model of speed returns None until
        the model is fitted.
        """
        return 0.0


def stop_without_new_best(
    patience: int | None, observations: Sequence[Observation], objective: Objective
) -> Stop | None:
    """Return `Stop` if the last trials brought no new best, else None.

    Args:
        patience: number of trials without a new best after which to stop; None for no limit. There
            is no limit either until a trial has run.
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

    Without an admitted value, return None and the number of all finished trials.
    """
    best, since = None, 0
    for observation in observations:
        if observation.outcome is None:
            continue
        value = observation.outcome.value(objective)
        if value is not None and observation.is_admitted and objective.is_better(value, best):
            best, since = value, 0
        else:
            since += 1
    return best, since


def largest_micro_batch(
    problem: Problem, memory: Memory | None, settings: Mapping[str, Any]
) -> float:
    """Return the largest micro batch that should fit with some settings; 0 if none does.

    Without `memory`, only activations count. The result is at most twice the largest of the space.
    """
    profile = problem.profile
    if memory is not None:
        largest = memory.largest(settings)
    else:
        largest = profile.slot_memory_bytes // max(1, profile.activation_bytes_per_sample)
    return min(largest, 2.0 * problem.space.micro_batches[-1])
