"""Arms of the classic searches: combinations of settings, each with its untried micro batches.

A search decides which arm to continue, which micro batch to try, and when to begin a new arm. At
each decision, the state of all arms is computed from the observations. A branch is a strategy with
its settings (`dsat.space.space.Branch`).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsat.search.base import (
    EXHAUSTED,
    Context,
    Observation,
    Problem,
    Proposal,
    Stop,
    Wait,
    largest_micro_batch,
)
from dsat.space.locate import Point
from dsat.values.objective import Objective
from dsat.values.outcome import OutcomeKind

_ERRORS = (OutcomeKind.ERROR, OutcomeKind.INVALID, OutcomeKind.DIVERGED)
_DRAWS = 4096  # most settings that one decision draws to find some that fit
_STEP_UP = 4  # most that the next micro batch may exceed the largest that ran, as a factor
_MOST_ERRORS = 4  # settings that may fail in a branch where nothing ran, before it is abandoned
_ABANDONED = (
    f"every configuration was tried, except in strategies where {_MOST_ERRORS} failed and none ran"
)
_WORTH_DOUBLING = math.log(1.05)  # least log growth of the rate per doubling of the micro batch
_BEYOND = 4  # allowed multiple of the micro batch where growth ended, because slow growth adds up


@dataclass
class Arm:
    """One combination of settings, and the range of micro batches that may still be tried.

    Attributes:
        branch, index: the settings, as in `Point`.
        sizes: allowed micro batches, ascending; `lo` and `hi` are positions in them.
        hi, lo: highest and lowest position of the open range, which is empty if `lo > hi`.
        number: position among the arms that the search began; None until it begins this one.
        best, best_size: best value of the objective, and its micro batch; None and 0 if none ran.
        latest: position of the search's latest trial of this arm among all observations.
    """

    branch: int
    index: int
    settings: Mapping[str, Any]
    sizes: Sequence[int]
    hi: int
    lo: int = 0
    number: int | None = None
    observed: list[Observation] = field(default_factory=list)
    best: float | None = None
    best_size: int = 0
    latest: int = 0
    _timeouts: int = 0

    @property
    def ours(self) -> list[Observation]:
        """The arm's trials that the search proposed."""
        return [t for t in self.observed if t.arm is not None]

    @property
    def trials(self) -> int:
        """Number of the arm's finished trials that the search proposed."""
        return sum(t.outcome is not None for t in self.ours)

    @property
    def is_running(self) -> bool:
        return any(t.outcome is None for t in self.ours)

    def observe(self, observation: Observation, objective: Objective) -> None:
        """Narrow the open range by the outcome of a trial with these settings.

        A success raises the lower end, because larger micro batches should be at least as fast.
        Running out of memory or data lowers the upper end. If the search proposed the trial, the
        first timeout lowers the upper end too; a second one or any other failure closes the arm.
        """
        size, outcome = observation.batch.micro_batch, observation.outcome
        is_ours = observation.arm is not None
        self.observed.append(observation)
        if outcome is None:
            return
        value, smaller = outcome.value(objective), bisect.bisect_left(self.sizes, size) - 1
        if value is not None and objective.is_better(value, self.best):
            self.best, self.best_size = value, size
        if outcome.ok:
            self.lo = max(self.lo, bisect.bisect_right(self.sizes, size))
        elif outcome.kind.is_out_of_memory or outcome.smaller_may_run:
            self.hi = min(self.hi, smaller)
        elif is_ours and outcome.kind is OutcomeKind.TIMEOUT and not self._timeouts:
            self._timeouts += 1
            self.hi = min(self.hi, smaller)
        elif is_ours:
            self.hi = -1

    def limit(self, micro_batch: float) -> None:
        """Exclude micro batches larger than this one."""
        self.hi = min(self.hi, bisect.bisect_right(self.sizes, micro_batch) - 1)

    def propose(self, position: int, **note: int) -> Proposal:
        """Propose the micro batch at a position in `sizes`; for `note` see `Proposal`."""
        return Proposal(Point(self.branch, self.index, self.sizes[position]), self.number, note)


@dataclass
class _Branch:
    """State of one strategy, from its trials.

    Attributes:
        largest_ran: the largest micro batch that ran; 0 if none did.
        least_failed: the smallest micro batch that ran out of memory; infinite if none did.
        at_smallest: number of trials that ran out of memory with the smallest allowed micro batch.
        errors: indices of settings that failed for other reasons than memory, data or time.
        has_run: whether a trial that the search proposed ran.
        drawn: indices of the settings that the search began.
    """

    largest_ran: int = 0
    least_failed: float = math.inf
    at_smallest: int = 0
    errors: set[int] = field(default_factory=set)
    has_run: bool = False
    drawn: set[int] = field(default_factory=set)

    @property
    def is_abandoned(self) -> bool:
        """Return whether the branch is abandoned, because too many of its settings failed."""
        return not self.has_run and len(self.errors) >= _MOST_ERRORS

    @property
    def failures(self) -> int:
        """Number of settings that do not fit at all; 0 once something ran."""
        return 0 if self.largest_ran else self.at_smallest


class Arms:
    """Arms of a search, computed from the observations.

    Args:
        observations: all trials, in the order in which they began.
        range_factor: upper end of arms, as a multiple of the largest micro batch that should fit.
        sizes: micro batches to try; by default all that the space allows.

    Attributes:
        begun: the arms that the search began, by number.
        known: all arms of this decision by branch and index, also those that the search did not
            begin.
        rng: random generator for this decision.
    """

    def __init__(
        self,
        problem: Problem,
        observations: Sequence[Observation],
        context: Context,
        *,
        range_factor: float = 1.0,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.problem = problem
        self.begun: dict[int, Arm] = {}
        self.branches = [_Branch() for _ in problem.space.branches]
        self._is_anything_running = any(o.outcome is None for o in observations)
        self.rng = np.random.default_rng([problem.seed, len(observations)])
        self._context = context
        self._range_factor = range_factor
        self._sizes = problem.space.micro_batches if sizes is None else sizes
        self.known: dict[tuple[int, int], Arm] = {}
        outcomes = [o.outcome for o in observations if o.outcome is not None]
        limits = [o.most_samples for o in outcomes if o.most_samples is not None]
        self._most_samples: float = min(limits, default=math.inf)
        self._too_large = [math.inf for _ in self.branches]  # smallest sizes that failures exclude
        self._largest = math.inf  # largest micro batch that ran, while throughput still grows
        if problem.ramp:
            self._limit_growth(observations)
        for position, observation in enumerate(observations):
            if observation.point is not None and observation.is_exact:
                self._observe(position, observation.point, observation)

    def _limit_growth(self, observations: Sequence[Observation]) -> None:
        """Limit micro batches also by speed and failures, since memory hardly limits small models.

        A million samples may fit where a hundred keep the device busy. So micro batches grow in
        steps from those that ran, stay below timeouts, and end where throughput stops growing.
        """
        ran: defaultdict[tuple[int, int], dict[int, tuple[float, float]]] = defaultdict(dict)
        objective = self.problem.objective
        too_large: defaultdict[int, list[int]] = defaultdict(list)
        for observation in observations:
            point, outcome = observation.point, observation.outcome
            if point is None or outcome is None:
                continue
            value, size = outcome.value(objective), observation.batch.micro_batch
            if value is not None and outcome.metrics is not None:
                rate = objective.log_value(value), outcome.metrics.standard_error
                ran[point.branch, point.index][size] = rate
            elif outcome.kind is OutcomeKind.TIMEOUT and size > self._sizes[0]:
                too_large[point.branch].append(size)
            elif outcome.kind is OutcomeKind.ERROR and outcome.most_samples is not None:
                for branch in range(len(self.branches)):
                    too_large[branch].append(size)
        for branch, sizes in too_large.items():
            # If a larger micro batch ran in this branch, the size did not cause the failure.
            most = max((max(ran[key]) for key in ran if key[0] == branch), default=0)
            self._too_large[branch] = min((s for s in sizes if s > most), default=math.inf)
        self._largest = max((size for sizes in ran.values() for size in sizes), default=math.inf)
        for rates in ran.values():
            for small, large in itertools.pairwise(sorted(rates)):
                larger = (rates[size][0] for size in rates if size > large)
                if max(larger, default=-math.inf) > rates[large][0] + _WORTH_DOUBLING:
                    continue  # something disturbed one of the two measurements
                octaves = math.log2(large / small)
                grown = rates[large][0] - rates[small][0] + rates[large][1]
                if octaves >= 1 and grown < _WORTH_DOUBLING * octaves:
                    self._most_samples = min(self._most_samples, _BEYOND * large)
                    self._largest = math.inf  # growth ended, so steps need no limit

    def _observe(self, position: int, point: Point, observation: Observation) -> None:
        outcome = observation.outcome
        branch, arm = self.branches[point.branch], self.arm(point.branch, point.index)
        if observation.arm is not None:
            self.begin(arm, observation.arm)
            arm.latest = position
        arm.observe(observation, self.problem.objective)
        if outcome is None:
            return
        if outcome.ok:
            branch.largest_ran = max(branch.largest_ran, point.micro_batch)
            branch.has_run |= observation.arm is not None
        elif outcome.kind.is_out_of_memory:
            branch.least_failed = min(branch.least_failed, point.micro_batch)
            branch.at_smallest += point.micro_batch == self._sizes[0]
        elif outcome.kind in _ERRORS and not outcome.smaller_may_run:
            branch.errors.add(point.index)

    @property
    def ready(self) -> list[Arm]:
        """Begun arms without a running trial that have micro batches left."""
        return [arm for arm in self.begun.values() if not arm.is_running and self.is_open(arm)]

    def is_open(self, arm: Arm) -> bool:
        """Return whether an arm has a micro batch left to try."""
        return self.middle(arm) is not None

    def middle(self, arm: Arm) -> int | None:
        """Return the middle of the open, allowed positions, or None; see `pick`."""
        return self.pick(arm, lambda: (arm.lo + arm.hi) // 2)

    def pick(self, arm: Arm, choose: Callable[[], int]) -> int | None:
        """Return an open position that `allows` accepts; None if there is none.

        `choose` returns a position in the open range. If that position is not allowed, the range
        ends below it from now on, and `choose` is called again. If the range reaches far beyond the
        micro batches that ran, the next step up is tried first.
        """
        step = self._next_step(arm) if arm.lo <= arm.hi else -1
        while arm.lo <= arm.hi:
            position, step = step if arm.lo <= step else choose(), -1
            if self.allows(arm, position):
                return position
            arm.hi = position - 1
        return None

    def _next_step(self, arm: Arm) -> int:
        """Return the position one step above the largest micro batch that ran; -1 if not needed."""
        end, largest = arm.sizes[arm.hi], self._largest
        failed = min(self.branches[arm.branch].least_failed, self._too_large[arm.branch])
        is_safe = math.isinf(failed)
        if end > _STEP_UP * largest or (end >= 2 * largest and is_safe):
            return min(arm.hi, self._position(_STEP_UP * largest))
        return -1

    def allows(self, arm: Arm, position: int) -> bool:
        """Return whether a micro batch is predicted to fit, and to be fast enough."""
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

        The first settings of every strategy (DeepSpeed's defaults, or the user's values) come
        first, in the order of the strategies. Strategies that ran out of memory at the smallest
        micro batch come last.

        Args:
            among: positions of the branches to draw from; all by default.

        Returns:
            None if no settings are left, or if none of those drawn (at most `_DRAWS`) fits.
        """
        branches = self.problem.space.branches
        candidates = list(range(len(branches)) if among is None else among)
        candidates = [number for number in candidates if not self.branches[number].is_abandoned]
        drawn = {number: set(self.branches[number].drawn) for number in candidates}
        for _ in range(_DRAWS):
            unfinished = [n for n in candidates if len(drawn[n]) < branches[n].count]
            if not unfinished:
                return None
            least = min(self.branches[n].failures for n in unfinished)
            unfinished = [n for n in unfinished if self.branches[n].failures == least]
            new = [n for n in unfinished if not drawn[n]]
            number = new[0] if new else unfinished[int(self.rng.integers(len(unfinished)))]
            index = 0  # the first settings are drawn first
            while index in drawn[number]:
                index = int(self.rng.integers(branches[number].count))
            drawn[number].add(index)
            arm = self.arm(number, index)
            results = self.branches[number]
            if not arm.ours and not results.largest_ran:  # stay below failures of other settings
                arm.limit(max(self._sizes[0], results.least_failed - 1))
            if self.is_open(arm):
                self.begin(arm)
                return arm
        return None

    def begin(self, arm: Arm, number: int | None = None) -> None:
        """Begin an arm; `number` is its number in recorded trials, None for a new arm."""
        if arm.number is None:
            arm.number = max(self.begun, default=-1) + 1 if number is None else number
            self.begun[arm.number] = arm
            self.branches[arm.branch].drawn.add(arm.index)

    def arm(self, branch: int, index: int) -> Arm:
        """Return the arm of the given settings, and create it at its first use."""
        arm = self.known.get((branch, index))
        if arm is None:
            settings = self.problem.space.branches[branch].settings(index)
            arm = Arm(branch, index, settings, self._sizes, self._highest(settings))
            arm.limit(min(self._most_samples, self._too_large[branch] - 1))
            self.known[branch, index] = arm
        return arm

    def largest(self, settings: Mapping[str, Any]) -> float:
        """Return the largest micro batch that should fit with some settings; 0 if none does."""
        return largest_micro_batch(self.problem, self._context.memory, settings)

    def _highest(self, settings: Mapping[str, Any]) -> int:
        """Return the highest position that should fit; -1 if none is predicted to fit."""
        largest = self.largest(settings)
        if self._context.memory is not None and largest < self._sizes[0]:
            return -1
        return max(0, self._position(self._range_factor * max(1, largest)))

    def _position(self, size: float) -> int:
        """Return the position of the largest allowed micro batch up to a size; -1 if none."""
        return bisect.bisect_right(self._sizes, size) - 1

    def finish(self) -> Wait | Stop:
        """Return the decision if no arm can continue: `Wait` while a trial runs, else `Stop`."""
        if self._is_anything_running:
            return Wait()
        branches = zip(self.branches, self.problem.space.branches, strict=True)
        is_whole = not any(b.is_abandoned and len(b.drawn) < s.count for b, s in branches)
        return Stop(EXHAUSTED if is_whole else _ABANDONED)
