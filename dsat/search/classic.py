"""The classic searches: which arm to continue, and when to begin a new one."""

from __future__ import annotations

import bisect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dsat.options import Option, at_least, search_option
from dsat.search.arms import Arm, Arms
from dsat.search.base import (
    NO_NEW_BEST,
    RANGE_FACTOR,
    Context,
    Decision,
    Observation,
    Problem,
    Proposal,
    Search,
    stop_without_new_best,
)


class ArmSearch(Search):
    """Base class of searches over arms."""

    ramps = True

    def __init__(self, problem: Problem, *, search_range_factor: float | None = None) -> None:
        super().__init__(problem)
        self._range_factor = search_range_factor or 1.0

    def propose(self, observations: Sequence[Observation], context: Context) -> Decision:
        problem, factor = self.problem, self._range_factor
        return self._propose(Arms(problem, observations, context, range_factor=factor))

    @abstractmethod
    def _propose(self, arms: Arms) -> Decision:
        """Return the decision, given the arms."""


class BinarySearch(ArmSearch):
    """Bisection of each arm's micro batches to the end; a new arm is drawn if none can continue."""

    summary = "bisects the micro batch of randomly drawn configurations"
    options: ClassVar[Mapping[str, Option]] = {"search_range_factor": RANGE_FACTOR}

    def _propose(self, arms: Arms) -> Decision:
        ready = arms.ready
        arm = min(ready, key=lambda each: each.latest) if ready else arms.draw()
        return arms.finish() if arm is None else _propose_middle(arms, arm)


class ASHASearch(ArmSearch):
    """Asynchronous successive halving (Li et al., arXiv:1810.05934) over arms.

    The resource of an arm is the number of trials of its bisection. An arm completes a rung after
    `min_trials * divisor ** (early_stopping + rung)` trials in total, or when its bisection ends.
    The best 1/divisor of the arms that completed a rung are promoted to the next one. The highest
    rung has priority. In a rung, promotions come first, then the arm with the most trials.
    """

    summary = "successive halving: many configurations get a few trials, the best ones more"
    options: ClassVar[Mapping[str, Option]] = {
        "max_rungs": search_option("--max-rungs", "number of rungs", kind=at_least(1), default=5),
        "min_trials": search_option(
            "--min-binary-search-trials",
            "trials that every drawn configuration gets",
            kind=at_least(1),
            default=3,
        ),
        "early_stopping": search_option(
            "--asha-early-stopping",
            "give each configuration divisor^N times as many trials before the first ones are "
            "dropped. Raise N if good ones are dropped too early (`s` in arXiv:1810.05934)",
            kind=at_least(0),
            default=0,
        ),
        "divisor": search_option(
            "--divisor",
            "1/divisor of the configurations go on to the next rung, with divisor times as many "
            "trials (`eta` in arXiv:1810.05934)",
            kind=at_least(2),
            default=2,
        ),
        "search_range_factor": RANGE_FACTOR,
    }

    def __init__(
        self,
        problem: Problem,
        *,
        max_rungs: int = 5,
        min_trials: int = 3,
        divisor: int = 2,
        early_stopping: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(problem, **options)
        self._divisor = divisor
        self._resources = [min_trials * divisor ** (early_stopping + r) for r in range(max_rungs)]

    def _propose(self, arms: Arms) -> Decision:
        rungs = self._rungs(arms)
        waiting = [
            (-rung, -arm.trials, number)
            for number, arm in arms.begun.items()
            if not arm.is_running and (rung := rungs[number]) is not None
            if arm.trials < self._resources[rung] and arms.is_open(arm)
        ]
        promoted = self._promote(arms, rungs)
        if promoted is not None and (not waiting or rungs[promoted] >= -min(waiting)[0]):
            return _propose_middle(arms, arms.begun[promoted], rung=rungs[promoted] + 1)
        if waiting:
            rung, _, number = min(waiting)
            return _propose_middle(arms, arms.begun[number], rung=-rung)
        arm = arms.draw()
        return arms.finish() if arm is None else _propose_middle(arms, arm, rung=0)

    def _rungs(self, arms: Arms) -> dict[int, int]:
        """Return the rung of each begun arm.

        An arm whose bisection has ended needs no further trial. So it is promoted here, without one
        and perhaps several times, and `_promote` returns only arms that can continue.
        """
        rungs = {
            number: max((each.note.get("rung", 0) for each in arm.ours), default=0)
            for number, arm in arms.begun.items()
        }
        for rung in range(len(self._resources) - 1):
            for number in self._best_of(arms, rungs, rung):
                if rungs[number] == rung and not arms.is_open(arms.begun[number]):
                    rungs[number] = rung + 1
        return rungs

    def _promote(self, arms: Arms, rungs: Mapping[int, int]) -> int | None:
        """Return the number of the arm to promote, from the highest possible rung, or None."""
        for rung in reversed(range(len(self._resources) - 1)):
            for number in self._best_of(arms, rungs, rung):
                if rungs[number] == rung:
                    return number
        return None

    def _best_of(self, arms: Arms, rungs: Mapping[int, int], rung: int) -> list[int]:
        """Return the numbers of the best 1/divisor of arms that completed a rung, best first."""
        completed = [
            number
            for number, arm in arms.begun.items()
            if rungs[number] > rung
            or (
                rungs[number] == rung
                and not arm.is_running
                and (arm.trials >= self._resources[rung] or not arms.is_open(arm))
            )
        ]
        loss = self.problem.objective.loss
        bests = [(arms.begun[number].best, number) for number in completed]
        ranked = sorted((loss(best), number) for best, number in bests if best is not None)
        return [number for _, number in ranked[: len(completed) // self._divisor]]


class RandomSearch(ArmSearch):
    """Search that draws micro batches around the middle of the open range, and ends arms early.

    An arm ends when its trials are used up, or when a sharding strategy with less traffic ran (such
    as stage 1 or 2 for an arm in stage 3 or with offloading). An arm that ran out of memory also
    ends if it cannot exceed the largest micro batch that ran in its branch. A new arm starts above
    the best micro batch of its branch if that should fit.
    """

    summary = "random configurations and micro batches, with early stopping"
    options: ClassVar[Mapping[str, Option]] = {
        "trials_per_config": search_option(
            "--trials-per-random-config",
            "maximum number of trials of one drawn configuration",
            kind=at_least(1),
            default=5,
        ),
        "early_stopping": NO_NEW_BEST,
        "search_range_factor": RANGE_FACTOR,
    }

    def __init__(
        self,
        problem: Problem,
        *,
        trials_per_config: int = 5,
        early_stopping: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(problem, **options)
        self._trials_per_config = trials_per_config
        self._patience = early_stopping

    def propose(self, observations: Sequence[Observation], context: Context) -> Decision:
        stop = stop_without_new_best(self._patience, observations, self.problem.objective)
        return stop or super().propose(observations, context)

    def _propose(self, arms: Arms) -> Decision:
        for arm in sorted(arms.ready, key=lambda each: each.latest):
            if not self._should_end(arms, arm):
                return self._draw_near_middle(arms, arm)
        worthwhile = [n for n in range(len(arms.branches)) if self._is_worthwhile(arms, n)]
        drawn = arms.draw(worthwhile)
        return arms.finish() if drawn is None else self._draw_near_middle(arms, drawn)

    def _draw_near_middle(self, arms: Arms, arm: Arm) -> Decision:
        """Propose an open micro batch of the arm, drawn near the middle of its range.

        A new arm starts above the best micro batch of its branch if possible, because all settings
        should get a trial with a large one.
        """
        loss = self.problem.objective.loss
        known = arms.known.values()
        own = [each for each in known if each.branch == arm.branch and each.best is not None]
        if own and not arm.ours:
            best = min(own, key=lambda each: loss(each.best or 0.0)).best_size
            above = min(bisect.bisect_right(arm.sizes, best), arm.hi)
            if arms.allows(arm, above):
                arm.lo = max(arm.lo, above)
        position = arms.pick(arm, lambda: arm.lo + int(arms.rng.binomial(arm.hi - arm.lo, 0.5)))
        return arms.finish() if position is None else arm.propose(position)

    def _is_worthwhile(self, arms: Arms, branch: int) -> bool:
        """Return whether no sharding strategy (stage 1 to 3) with less traffic has run."""
        strategies = self.problem.space.strategies
        burden = strategies[branch].burden
        return not any(
            known.largest_ran and strategy.stage > 0 and strategy.burden < burden
            for known, strategy in zip(arms.branches, strategies, strict=True)
        )

    def _should_end(self, arms: Arms, arm: Arm) -> bool:
        largest_ran = arms.branches[arm.branch].largest_ran
        ended = [each.outcome for each in arm.ours if each.outcome is not None]
        return (
            arm.trials >= self._trials_per_config
            or not self._is_worthwhile(arms, arm.branch)
            or (
                any(outcome.kind.is_out_of_memory for outcome in ended)
                and largest_ran >= arm.sizes[max(arm.hi, 0)]
            )
        )


def _propose_middle(arms: Arms, arm: Arm, **note: int) -> Proposal:
    position = arms.middle(arm)
    assert position is not None
    return arm.propose(position, **note)
