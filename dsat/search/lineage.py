"""A lineage: one choice of settings and the search for its micro batch."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsat.values.objective import Objective
from dsat.values.outcome import Outcome, OutcomeKind


@dataclass
class Lineage:
    """Bounds on the micro batch of one choice of settings, as positions in the allowed ones.

    Attributes:
        branch: the number of its branch of the space.
        index: their number in the branch, where that is known.
        settings: what is tried, but for the micro batch.
        micro_batches: all allowed micro batches, ascending.
        ceiling: the largest micro batch to begin with.
        lo, hi: what is still open, both ends included; nothing is when lo > hi.
        trials: how many were recorded.
        best: the best value of the objective so far.
        out_of_memory: whether a trial ran out of memory.
        abandoned: it failed in a way that no other micro batch would avoid.
        asked: positions that were proposed, where that is kept.
    """

    id: int
    branch: int
    settings: Mapping[str, Any]
    micro_batches: Sequence[int]
    ceiling: int
    lo: int = 0
    hi: int = field(init=False)
    trials: int = 0
    best: float | None = None
    out_of_memory: bool = False
    abandoned: bool = False
    timeouts: int = 0
    index: int = 0
    asked: set[int] = field(default_factory=set)
    _slow_from: int | None = None

    def __post_init__(self) -> None:
        self.hi = max(0, bisect.bisect_right(self.micro_batches, self.ceiling) - 1)

    @property
    def open_hi(self) -> int:
        """The upper end to try: below everything that was too slow to finish."""
        return self.hi if self._slow_from is None else min(self.hi, self._slow_from - 1)

    @property
    def finished(self) -> bool:
        return self.abandoned or self.lo > self.open_hi

    def middle(self) -> int:
        """Middle of the open positions."""
        return (self.lo + self.open_hi) // 2

    def position(self, micro_batch: int) -> int:
        """Return the position of a micro batch among the allowed ones."""
        return bisect.bisect_left(self.micro_batches, micro_batch)

    def record(self, micro_batch: int, outcome: Outcome, objective: Objective) -> None:
        """Narrows the bounds by the outcome of a trial.

        Out of memory (or of data) shrinks from above, a success raises the floor. A time-out says
        nothing of memory: the bounds stay, but nothing slower is tried, and the second one ends the
        lineage. Any other failure abandons the lineage.
        """
        self.trials += 1
        self.learn(micro_batch, outcome, objective)
        position = self.position(micro_batch)
        if outcome.ok:
            self.lo = max(self.lo, position + 1)
        elif outcome.kind.is_out_of_memory or outcome.smaller_may_run:
            self.out_of_memory |= outcome.kind.is_out_of_memory
        elif outcome.kind is OutcomeKind.TIMEOUT:
            self.timeouts += 1
            # Of several that ran at once, another may have failed before.
            self._slow_from = min(position, self.open_hi + 1)
            self.abandoned |= self.timeouts > 1
        else:
            self.abandoned = True

    def learn(self, micro_batch: int, outcome: Outcome, objective: Objective) -> None:
        """Update the bounds with a trial of another source.

        Nothing below the best that ran is tried, nor above the smallest that did not fit.
        """
        value, position = outcome.value(objective), self.position(micro_batch)
        if value is not None and objective.is_better(value, self.best):
            self.best = value
            self.lo = max(self.lo, position + 1)
        elif outcome.kind.is_out_of_memory or outcome.smaller_may_run:
            self.hi = min(self.hi, position - 1)

    def limit(self, micro_batch: float) -> None:
        """Exclude larger micro batches, for which there are too few data."""
        self.hi = min(self.hi, bisect.bisect_right(self.micro_batches, micro_batch) - 1)
