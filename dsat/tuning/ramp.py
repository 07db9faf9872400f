"""The ramp: how far the micro batch is worth raising, found out before a search begins.

Memory alone says nothing about small models: a million samples may fit where a hundred keep the
device busy. So the user's own micro batch is doubled (quadrupled as long as that brings much) until
throughput no longer grows, memory or the data set ends it, or a trial would take long beside the
user's own.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterator, Sequence

from dsat.space.space import Space
from dsat.tuning.run import Run
from dsat.tuning.trial_costs import TOO_LONG_S
from dsat.values.outcome import Outcome

WORTH_DOUBLING = math.log(1.05)
_STEEP = math.log(1.25)  # growth for each doubling that is far from its end
BEYOND = 4  # times as many samples as where growth has ended: slow growth adds up
_FINE_ENOUGH = 1.03  # micro batches nearer to each other than this are as good as the same


def halfway(best: int, tried: Collection[int], allowed: Sequence[int]) -> Iterator[int]:
    """Yield micro batches halfway between the best and its tried neighbours, the farther first.

    Args:
        best: one of `tried`.
        tried: with the same settings, whatever came of it.
        allowed: all that may be tried, ascending.
    """
    below = [size for size in tried if size < best]
    above = [size for size in tried if size > best]
    gaps = [(best / max(below), max(below))] if below else []
    gaps += [(min(above) / best, min(above))] if above else []
    for ratio, neighbour in sorted(gaps, reverse=True):
        if ratio > _FINE_ENOUGH:
            middle = bisect.bisect_left(allowed, math.sqrt(best * neighbour))
            if middle < len(allowed) and allowed[middle] not in tried:
                yield allowed[middle]


class Ramp:
    """Proposes micro batches of one branch of the space, one after the other.

    Args:
        run: the run so far, whose model is profiled.
        space: what may be tried.
        branch: the number of the branch, with its first settings.
        own: outcome of the user's own configuration, if it is of this branch's strategy.

    Attributes:
        branch: as given.
        limit: the largest micro batch that a search should look at; None if the ramp knows none.
    """

    def __init__(self, run: Run, space: Space, branch: int, own: Outcome | None) -> None:
        self.branch = branch
        self.limit: int | None = None
        self._run = run
        self._sizes = space.micro_batches
        start, end, _ = run.plan.measured.get("steps", (3, 7, 0))
        self._steps = end - start + 1
        self._over = False
        self._last: tuple[int, float] | None = None  # micro batch, logarithm of its value
        micro_batch = run.plan.own_batch.micro_batch
        position = max(0, bisect.bisect_right(self._sizes, micro_batch) - 1)
        self._next: int | None = self._sizes[position]
        if own is not None:
            if self._next == micro_batch:
                self._next = None
            self.update(micro_batch, own)

    def ask(self) -> int | None:
        """The next micro batch; None while the one before runs, or if the ramp is over."""
        found, self._next = self._next, None
        return found

    def update(self, micro_batch: int, outcome: Outcome) -> None:
        """Process the outcome of a micro batch of the ramp."""
        value = outcome.value(self._run.plan.objective)
        if value is None or outcome.metrics is None:
            self._over = True
            if outcome.smaller_may_run:
                self._limit_to(outcome.most_samples or micro_batch - 1)
            return
        log_value = self._run.plan.objective.log_value(value)
        latency_s = outcome.metrics.latency / 1000
        before, self._last = self._last, (micro_batch, log_value)
        factor = 4  # far from where growth ends, information comes sooner in larger steps
        self.limit = None
        if before is not None:
            grown = log_value - before[1] + outcome.metrics.standard_error
            octaves = math.log2(micro_batch / before[0])
            if grown < WORTH_DOUBLING * octaves:
                self._over = True
                self.limit = BEYOND * micro_batch
            if grown < _STEEP * octaves:
                factor = 2
        longest_s = max(TOO_LONG_S, self._run.longest_s or 0.0)
        affordable = int(micro_batch * longest_s / (latency_s * self._steps))
        affordable = min(affordable, self._run.most_samples or affordable)
        self._limit_to(max(micro_batch, affordable))
        following = self._following(factor * micro_batch)
        if following > affordable:
            following = self._following(2 * micro_batch)
        if following > affordable or following <= micro_batch:
            self._over = True
        elif not self._over:
            self._next = following

    def _limit_to(self, micro_batch: int) -> None:
        self.limit = min(self.limit or micro_batch, micro_batch)

    def _following(self, size: int) -> int:
        """The smallest allowed micro batch of at least so many samples, or the largest of all."""
        position = bisect.bisect_left(self._sizes, size)
        return self._sizes[min(position, len(self._sizes) - 1)]
