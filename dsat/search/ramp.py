"""How far the user's own micro batch is worth raising, measured before a search begins."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsat.search.base import Context, Observation, Problem, Source
from dsat.values.outcome import Outcome

_WORTH_DOUBLING = math.log(1.05)  # growth of the rate for each doubling
_STEEP = math.log(1.25)  # growth that is far from its end
BEYOND = 4  # searched beyond where growth has ended: slow growth adds up


@dataclass
class Ramp:
    """The user's own micro batch, raised step by step in the first settings of its strategy.

    For small models, memory is no guide: a million samples may fit where a hundred keep the device
    busy. So the micro batch is doubled (quadrupled while that brings much) until throughput
    no longer grows, memory or the data end, or a trial would take too long.

    Attributes:
        branch: position of the strategy.
        next: the next micro batch to try; None if the ramp is over.
        limit: the largest micro batch that is worth a trial; None if that is not known.
    """

    branch: int
    next: int | None
    limit: int | None = None

    @classmethod
    def follow(
        cls, problem: Problem, observations: Sequence[Observation], context: Context
    ) -> Ramp | None:
        """Return where the ramp has come to; None without the user's own configuration."""
        own = next((each for each in observations if each.source is Source.BASELINE), None)
        sizes = problem.space.micro_batches
        if own is None or not sizes:
            return None
        start = sizes[max(0, bisect.bisect_right(sizes, own.batch.micro_batch) - 1)]
        ramp = cls(0 if own.point is None else own.point.branch, start)
        results = {
            each.point.micro_batch: each.outcome
            for each in observations
            if each.is_exact and each.point is not None and each.source is not Source.FINAL
            if (each.point.branch, each.point.index) == (ramp.branch, 0)
        }
        before = None
        if own.point is not None and own.outcome is not None:
            if start == own.batch.micro_batch:
                ramp.next = None
            before = ramp._climb(problem, own.batch.micro_batch, own.outcome, None, context)
        while ramp.next is not None and results.get(ramp.next) is not None:
            size, ramp.next = ramp.next, None
            before = ramp._climb(problem, size, results[size], before, context)
        return ramp

    def _climb(
        self,
        problem: Problem,
        size: int,
        outcome: Outcome | None,
        before: tuple[int, float] | None,
        context: Context,
    ) -> tuple[int, float] | None:
        """Decide by the outcome of a micro batch; return it with the logarithm of its value."""
        assert outcome is not None
        objective, sizes = problem.objective, problem.space.micro_batches
        value = outcome.value(objective)
        if value is None or outcome.metrics is None:
            self.next = None
            if outcome.smaller_may_run:
                self._limit_to(outcome.most_samples or size - 1)
            return None
        log_value, self.limit = objective.log_value(value), None
        factor, is_over = 4, False  # far from the end, larger steps teach more
        if before is not None:
            grown = log_value - before[1] + outcome.metrics.standard_error
            octaves = math.log2(size / before[0])
            if grown < _WORTH_DOUBLING * octaves:
                is_over, self.limit = True, BEYOND * size
            if grown < _STEEP * octaves:
                factor = 2
        affordable = sizes[-1]
        if context.costs is not None:
            latency_s = outcome.metrics.latency / 1000
            affordable = int(min(affordable, size * context.costs.longest_step_s / latency_s))
        affordable = min(affordable, outcome.most_samples or affordable)
        self._limit_to(max(size, affordable))
        following = self._at_least(factor * size, sizes)
        if following > affordable:
            following = self._at_least(2 * size, sizes)
        if is_over:
            self.next = None
        elif size < following <= affordable:
            self.next = following
        return size, log_value

    def _limit_to(self, micro_batch: int) -> None:
        self.limit = min(self.limit or micro_batch, micro_batch)

    @staticmethod
    def _at_least(size: int, sizes: Sequence[int]) -> int:
        """Return the smallest allowed micro batch from a size on, or the largest of all."""
        return sizes[min(bisect.bisect_left(sizes, size), len(sizes) - 1)]
