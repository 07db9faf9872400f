"""The arms of a classic search, as the observations leave them.

The classic searches differ in which arm they continue and when they begin a new one. What is known
of the arms is computed from the observations at each decision.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsat.search.arm import Arm
from dsat.search.base import (
    EXHAUSTED,
    Context,
    Observation,
    Problem,
    Proposal,
    Source,
    Stop,
    Wait,
    largest_micro_batch,
)

# While nothing has run in any strategy, a new arm begins below the failed micro batch by this
# factor: bisecting every arm from the top would cost the whole budget.
_STEP_DOWN = 4
_DRAWS = 4096  # settings that are drawn in one decision until some fit


@dataclass
class _Branch:
    """Memory of one strategy, according to its trials.

    Attributes:
        largest_ran: the largest micro batch that ran; 0 if none did.
        least_failed: the smallest micro batch that ran out of memory.
        at_smallest: number of trials that did so with the smallest allowed micro batch.
        drawn: numbers of the settings that the search has begun.
    """

    largest_ran: int = 0
    least_failed: float = math.inf
    at_smallest: int = 0
    drawn: set[int] = field(default_factory=set)

    @property
    def failures(self) -> int:
        """Number of settings that do not fit at all, while none runs."""
        return 0 if self.largest_ran else self.at_smallest


class Arms:
    """The arms of a search, as the observations leave them.

    Args:
        problem: what is searched.
        observations: all trials, in the order in which they began.
        context: predictions of memory and of durations.
        range_factor: multiplies the largest micro batch that is predicted to fit.
        sizes: micro batches to try; by default all that the space allows.
        goes_beyond: where memory is not predicted, an arm may use any micro batch up to this many
            times the largest that ran in its strategy.
        is_bounded: where memory is not predicted, begin below what activations alone would fill.

    Attributes:
        begun: the arms that the search began, by their numbers.
        branches: memory of each strategy.
        is_anything_running: a trial has not ended.
        rng: of the decision.
    """

    def __init__(
        self,
        problem: Problem,
        observations: Sequence[Observation],
        context: Context,
        *,
        range_factor: float = 1.0,
        sizes: Sequence[int] | None = None,
        goes_beyond: float = 1.0,
        is_bounded: bool = True,
    ) -> None:
        self.problem = problem
        self.begun: dict[int, Arm] = {}
        self.branches = [_Branch() for _ in problem.space.branches]
        self.is_anything_running = any(each.outcome is None for each in observations)
        self._context = context
        self._range_factor = range_factor
        self._goes_beyond = goes_beyond
        self._is_bounded = is_bounded
        self._sizes = problem.space.micro_batches if sizes is None else sizes
        self._arms: dict[tuple[int, int], Arm] = {}
        self.rng = np.random.default_rng([problem.seed, len(observations)])
        outcomes = [each.outcome for each in observations if each.outcome is not None]
        limits = [each.most_samples for each in outcomes if each.most_samples is not None]
        self._most_samples: float = min(limits, default=math.inf)
        inside = [each for each in observations if _is_inside(each)]
        for observation in inside:
            self._note_memory(observation)
        for position, observation in enumerate(inside):
            self._observe(position, observation)

    def _note_memory(self, observation: Observation) -> None:
        point, outcome = observation.point, observation.outcome
        if point is None or outcome is None:
            return
        branch = self.branches[point.branch]
        if outcome.ok:
            branch.largest_ran = max(branch.largest_ran, point.micro_batch)
        elif outcome.kind.is_out_of_memory:
            branch.least_failed = min(branch.least_failed, point.micro_batch)
            branch.at_smallest += point.micro_batch == self._sizes[0]

    def _observe(self, position: int, observation: Observation) -> None:
        point = observation.point
        assert point is not None
        arm = self.arm(point.branch, point.index)
        if observation.arm is not None:
            self._number(arm, observation.arm)
            arm.latest = position
        arm.observe(observation, self.problem.objective)

    def limit(self, micro_batch: float) -> None:
        """Exclude larger micro batches from all arms."""
        self._most_samples = min(self._most_samples, micro_batch)
        for arm in self._arms.values():
            arm.limit(self._most_samples)

    @property
    def all(self) -> list[Arm]:
        """All arms of which there is a trial, those of other sources first, then by number."""
        return sorted(self._arms.values(), key=lambda a: -1 if a.number is None else a.number)

    @property
    def ready(self) -> list[Arm]:
        """The begun arms of which no trial runs and something is open, by their numbers."""
        return [
            a for a in self.all if a.number is not None and not a.is_running and self.is_open(a)
        ]

    def is_open(self, arm: Arm) -> bool:
        """Return whether an arm has a micro batch left to try."""
        return self.middle(arm) is not None

    def middle(self, arm: Arm) -> int | None:
        """Return the middle of the open positions; None if there is none.

        What is predicted not to fit, or to take too long, closes all above it.
        """
        return self.pick(arm, lambda: (arm.lo + arm.open_hi) // 2)

    def pick(self, arm: Arm, choose: Callable[[], int]) -> int | None:
        """Return the first allowed position that a function chooses among the open ones."""
        while not arm.is_exhausted:
            position = choose()
            if self.allows(arm, position):
                return position
            arm.hi = position - 1
        return None

    def allows(self, arm: Arm, position: int) -> bool:
        """Return whether a micro batch is predicted to fit and to take no longer than allowed."""
        memory, costs, size = self._context.memory, self._context.costs, arm.sizes[position]
        if memory is not None and not memory.fits(arm.settings, size):
            return False
        if costs is None:
            return True
        space = self.problem.space
        batch = space.batch(size, arm.settings)
        return not costs.are_too_long(costs.step_s(space.strategies[arm.branch], batch))

    def draw(self, among: Iterable[int] | None = None) -> Arm | None:
        """Begin an arm whose settings were not drawn before.

        The first settings of every strategy come first, as strategies are listed: DeepSpeed's
        defaults, or what the user chose. Strategies that run out of memory at the smallest micro
        batch come last.

        Args:
            among: numbers of the branches to draw from; by default all.

        Returns:
            None if all were drawn, or none fits.
        """
        branches = self.problem.space.branches
        candidates = list(range(len(branches)) if among is None else among)
        drawn = {number: set(self.branches[number].drawn) for number in candidates}
        for _ in range(_DRAWS):
            left = [n for n in candidates if len(drawn[n]) < branches[n].count]
            if not left:
                return None
            least = min(self.branches[n].failures for n in left)
            left = [n for n in left if self.branches[n].failures == least]
            new = [n for n in left if not drawn[n]]
            number = new[0] if new else left[int(self.rng.integers(len(left)))]
            index = _undrawn(branches[number].count, drawn[number], self.rng)
            drawn[number].add(index)
            arm = self.arm(number, index)
            if not arm.trials:
                arm.limit(self.memory_limit(number))
            if self.is_open(arm):
                self.begin(arm)
                return arm
        return None

    def begin(self, arm: Arm) -> None:
        """Give an arm the next number."""
        self._number(arm, max(self.begun, default=-1) + 1)

    def arm(self, branch: int, index: int) -> Arm:
        """Return the arm of some settings, made at its first use."""
        arm = self._arms.get((branch, index))
        if arm is None:
            settings = self.problem.space.branches[branch].settings(index)
            arm = Arm(branch, index, settings, self._sizes, self._highest(branch, settings))
            arm.limit(self._most_samples)
            self._arms[branch, index] = arm
        return arm

    def largest(self, settings: Mapping[str, Any]) -> float:
        """Return the largest micro batch that settings should allow; 0 if none."""
        return largest_micro_batch(self.problem, self._context.memory, settings)

    def _highest(self, branch: int, settings: Mapping[str, Any]) -> int:
        """Return the highest position that settings should allow; -1 if none is."""
        largest, is_predicted = self.largest(settings), self._context.memory is not None
        if is_predicted and largest < self._sizes[0]:
            return -1
        if not (is_predicted or self._is_bounded):
            return len(self._sizes) - 1
        found = max(0, self._position(max(1, int(self._range_factor * largest))))
        if not is_predicted and self._goes_beyond > 1:
            beyond = self._goes_beyond * self.branches[branch].largest_ran
            found = max(found, self._position(beyond))
        return min(found, len(self._sizes) - 1)

    def _position(self, size: float) -> int:
        """Return the position of the largest allowed micro batch up to a size; -1 if none."""
        return bisect.bisect_right(self._sizes, size) - 1

    def memory_limit(self, number: int) -> float:
        """Return the largest micro batch of a new arm while nothing ran in its strategy."""
        branch = self.branches[number]
        if branch.largest_ran or math.isinf(branch.least_failed):
            return math.inf
        anything_ran = any(other.largest_ran for other in self.branches)
        below = branch.least_failed - 1 if anything_ran else branch.least_failed // _STEP_DOWN
        return max(self._sizes[0], below)  # other settings may need less

    def _number(self, arm: Arm, number: int) -> None:
        if arm.number is None:
            arm.number = number
            self.begun[number] = arm
            self.branches[arm.branch].drawn.add(arm.index)

    def finish(self) -> Proposal | Wait | Stop:
        """Return what to do if there is no arm to continue or to begin.

        Micro batches halfway between the best one and its tried neighbours are tried last.
        """
        if self.is_anything_running:
            return Wait()
        objective = self.problem.objective
        ran = [arm for arm in self.begun.values() if arm.best is not None]
        if self.problem.ramp and ran:
            best = min(ran, key=lambda arm: objective.loss(arm.best or 0.0))
            for position in best.halfway():
                if self.allows(best, position):
                    return best.propose(position)
        return Stop(EXHAUSTED)


def _is_inside(observation: Observation) -> bool:
    """Return whether an observation is of a configuration of the space, finals left out."""
    is_final = observation.source is Source.FINAL
    return observation.point is not None and observation.is_exact and not is_final


def _undrawn(count: int, drawn: Collection[int], rng: np.random.Generator) -> int:
    """Draw one of 0..count-1 that was not drawn, 0 first."""
    if not drawn:
        return 0
    if count > 2 * len(drawn):
        while (index := int(rng.integers(count))) in drawn:
            pass
        return index
    left = [index for index in range(count) if index not in drawn]
    return left[int(rng.integers(len(left)))]
