"""The batch sizes that may be tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsat.values.trial import BatchTriple

LARGEST_MICRO_BATCH = 2**20


@dataclass(frozen=True, kw_only=True)
class BatchRule:
    """The user's constraints on batch sizes.

    Attributes:
        data_parallel: the largest data-parallel size of a trial; 0 for the number of its slots.
        own_batch: the batch sizes of the user's own configuration.
        train_batch_size: if given, the exact global batch size of every configuration.
        divisible_by: micro batches are multiples of this.
        micro_batches: the only micro batches to try; empty for no such limit.
        min_micro_batch, max_micro_batch: inclusive bounds; no maximum means `LARGEST_MICRO_BATCH`.
        max_train_batch_size: if given, accumulation fills the global batch up to this size.
    """

    slots_per_trial: int
    own_batch: BatchTriple
    train_batch_size: int | None = None
    divisible_by: int = 1
    micro_batches: tuple[int, ...] = ()
    min_micro_batch: int = 1
    max_micro_batch: int | None = None
    max_train_batch_size: int | None = None
    data_parallel: int = 0

    @property
    def most_groups(self) -> int:
        """Largest number of data-parallel groups of a trial."""
        return self.data_parallel or self.slots_per_trial

    @property
    def allowed_micro_batches(self) -> Sequence[int]:
        """All allowed micro batches, ascending; empty if the limits contradict each other."""
        smallest, largest = self.min_micro_batch, self.max_micro_batch or LARGEST_MICRO_BATCH
        if self.max_train_batch_size is not None:
            largest = min(largest, self.max_train_batch_size // self.most_groups)
        if self.train_batch_size is None and not self.micro_batches:
            first = -(-smallest // self.divisible_by) * self.divisible_by
            return range(first, largest + 1, self.divisible_by)
        candidates = set(self.micro_batches)
        if self.train_batch_size is not None:
            divisors = self._micro_batches_of(self.train_batch_size)
            candidates = divisors & candidates if self.micro_batches else divisors
        return tuple(
            size
            for size in sorted(candidates)
            if size % self.divisible_by == 0 and smallest <= size <= largest
        )

    def admits(self, batch: BatchTriple) -> bool:
        """Return whether batch sizes obey `divisible_by` and the constraints on the global batch.

        The bounds and the list of micro batches are not checked.
        """
        if self.train_batch_size not in (None, batch.train_batch_size):
            return False
        largest = self.max_train_batch_size
        if largest is not None and batch.train_batch_size > largest:
            return False
        return batch.micro_batch % self.divisible_by == 0

    def _micro_batches_of(self, train_batch_size: int) -> set[int]:
        """Return the divisors of `train_batch_size / most_groups`; empty if that is no integer."""
        per_slot, rest = divmod(train_batch_size, self.most_groups)
        most = 0 if rest else min(math.isqrt(per_slot), LARGEST_MICRO_BATCH)
        small = [d for d in range(1, most + 1) if per_slot % d == 0]
        return {*small, *(per_slot // d for d in small)}
