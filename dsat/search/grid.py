"""Grid search: all strategies and settings, with a few micro batches each."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from dsat.options import Option, at_least, search_option
from dsat.search.arms import Arm, Arms
from dsat.search.base import (
    Context,
    Decision,
    Observation,
    Problem,
    Search,
    count_since_best,
    early_stopping,
)


class GridSearch(Search):
    """Search through every strategy in order, and through all settings of each, defaults first.

    From a list of allowed micro batches, it tries all, the smallest first. From a range, it tries
    powers of two (times the step): first the largest that should fit, then larger ones while they
    run, then smaller ones. If memory, data or time do not suffice, it tries only smaller ones from
    then on. After a second timeout or any other failure, it goes on to the next settings.

    While a trial of some settings runs, the next settings begin. A branch (the settings of one
    strategy) comes last if nothing ran in it and settings did not fit at the smallest micro batch.

    Args:
        num_micro_batches: continue with the next settings after this number of micro batches that
            ran; by default all are tried.
        early_stopping: leave a branch after this number of trials without a new best in it. If none
            ran in it, the settings already begun are still tried down to the smallest micro batch.
    """

    summary = "every configuration in order: every setting, every micro batch"
    options: ClassVar[Mapping[str, Option]] = {
        "num_micro_batches": search_option(
            "--num-micro-batches",
            "go on to the next settings after N micro batches that ran: a small N compares more "
            "settings (default: try all micro batches). The first micro batch is the largest power "
            "of two that should fit, or the smallest divisor of a fixed --train-batch-size",
            kind=at_least(1),
        ),
        "early_stopping": early_stopping(
            "skip the rest of a ZeRO stage after N of its trials without a better one"
        ),
    }

    def __init__(
        self,
        problem: Problem,
        *,
        num_micro_batches: int | None = None,
        early_stopping: int | None = None,
    ) -> None:
        super().__init__(problem)
        self._num_micro_batches = num_micro_batches
        self._patience = math.inf if early_stopping is None else early_stopping
        self._sizes = _grid(problem.space.micro_batches)

    def propose(self, observations: Sequence[Observation], context: Context) -> Decision:
        # Without memory predictions, the limit by activations alone may be too low.
        factor = math.inf if context.memory is None else 1.0
        arms = Arms(self.problem, observations, context, range_factor=factor, sizes=self._sizes)
        progress = self._progress(observations)
        for _, arm in sorted(arms.begun.items()):
            best, since_best = progress[arm.branch]
            if arm.is_running or (best is not None and since_best >= self._patience):
                continue
            position = self._next(arms, arm)
            if position is not None:
                return arm.propose(position)
        return self._begin(arms, progress)

    def _begin(self, arms: Arms, progress: Sequence[tuple[float | None, int]]) -> Decision:
        """Begin the next settings, in the branch with the fewest settings that do not fit."""
        for number in sorted(range(len(progress)), key=lambda n: arms.branches[n].failures):
            _, since_best = progress[number]
            if since_best >= self._patience or arms.branches[number].is_abandoned:
                continue
            for index in range(self.problem.space.branches[number].count):
                if index in arms.branches[number].drawn:
                    continue
                arm = arms.arm(number, index)
                position = self._next(arms, arm)
                if position is not None:
                    arms.begin(arm)
                    return arm.propose(position)
        return arms.finish()

    def _next(self, arms: Arms, arm: Arm) -> int | None:
        """Return an arm's next position: first upwards, then downwards; None at the end."""
        ran = sum(trial.outcome is not None and trial.outcome.ok for trial in arm.ours)
        if ran == self._num_micro_batches:
            return None
        past_sizes = {trial.batch.micro_batch for trial in arm.observed}
        if arm.ours:
            start = bisect.bisect_left(self._sizes, arm.ours[0].batch.micro_batch)
        else:
            start = self._first(arms.largest(arm.settings))
        way = (*range(start, len(self._sizes)), *range(start - 1, -1, -1))
        fitting = (i for i in way if i <= arm.hi and self._sizes[i] not in past_sizes)
        return next((i for i in fitting if arms.allows(arm, i)), None)

    def _first(self, largest: float) -> int:
        if not isinstance(self.problem.space.micro_batches, range):
            return 0
        return max(0, bisect.bisect_right(self._sizes, max(1, int(largest))) - 1)

    def _progress(self, observations: Sequence[Observation]) -> list[tuple[float | None, int]]:
        """Return each branch's best value, and the number of proposed trials that ended since."""
        proposed: list[list[Observation]] = [[] for _ in self.problem.space.branches]
        for observation in observations:
            if observation.point is not None and observation.arm is not None:
                proposed[observation.point.branch].append(observation)
        return [count_since_best(trials, self.problem.objective) for trials in proposed]


def _grid(micro_batches: Sequence[int]) -> Sequence[int]:
    """Return the micro batches to try: all of a list, or a range's powers of two times its step.

    If a range contains no such size, return its first micro batch.
    """
    if not isinstance(micro_batches, range):
        return micro_batches
    sizes = []
    size = micro_batches.step
    while size <= micro_batches[-1]:
        if size in micro_batches:
            sizes.append(size)
        size *= 2
    return tuple(sizes) or (micro_batches[0],)
