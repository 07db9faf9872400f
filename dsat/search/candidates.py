"""Selection of micro batches and settings to compare."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

import numpy as np

from dsat.search.normal import Array

_FEW = 64  # so many micro batches are all compared
_PER_OCTAVE = 8  # of more than that, so many from one power of two to the next
_NEAR_THE_EDGE = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.87)
_NEAR_THE_BEST = (0.94, 0.97, 1.03, 1.06)


class MicroBatches:
    """The micro batches that are compared, out of those that are allowed.

    Attributes:
        ladder: those that are compared wherever memory ends, ascending.
    """

    def __init__(self, micro_batches: Sequence[int]) -> None:
        self._all = micro_batches
        self.ladder: Sequence[int] = micro_batches
        if len(micro_batches) > _FEW:
            octaves = math.ceil(math.log2(micro_batches[-1] + 1))
            sizes = {
                2**octave * (_PER_OCTAVE + part) // _PER_OCTAVE
                for octave in range(octaves)
                for part in range(_PER_OCTAVE)
            }
            at_or_below = {self._position(size) for size in sizes}
            self._rungs = sorted(position for position in at_or_below if position >= 0)
            self.ladder = [micro_batches[position] for position in self._rungs]

    def positions(self, *, edges: Sequence[float], best: Iterable[float]) -> list[int]:
        """Positions in the allowed micro batches, ascending.

        Args:
            edges: where memory should end; little above is worth a look.
            best: the micro batch of the best so far.
        """
        if len(self._all) <= _FEW:
            return list(range(len(self._all)))
        count = bisect.bisect_right(self.ladder, 4 * max(edges))
        near = [part * edge for edge in edges for part in _NEAR_THE_EDGE]
        near += [part * size for size in best for part in _NEAR_THE_BEST]
        found = {self._position(size) for size in near}.union(self._rungs[:count] or [0])
        return sorted(position for position in found if position >= 0)

    def _position(self, size: float) -> int:
        """Return the position of the largest micro batch up to a size; -1 for none."""
        return bisect.bisect_right(self._all, size) - 1


def largest_sums(scores: Sequence[Array], strides: Sequence[int], count: int) -> Array:
    """Numbers of the `count` settings with the largest sums of one score for each knob."""
    totals, indexes = np.zeros(1), np.zeros(1, int)
    for score, stride in zip(scores, strides, strict=True):
        sums = (totals[:, None] + score[None, :]).ravel()
        numbers = (indexes[:, None] + stride * np.arange(len(score))[None, :]).ravel()
        kept = np.argsort(-sums, kind="stable")[:count]
        totals, indexes = sums[kept], numbers[kept]
    return indexes
