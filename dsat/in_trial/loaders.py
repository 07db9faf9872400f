"""PyTorch's data loaders: time spent waiting for them, batches in advance, and samples.

As long as a loader feeds from what its workers made in advance, a script looks faster than it is.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from typing import Any

# What is known of a loader: the batch size, and the most samples of an epoch on this rank.
Kind = tuple[int, int]
_in_store = 0
_waited_s = 0.0
_begun: Counter[Kind] = Counter()  # epochs
_read: Counter[Kind] = Counter()  # batches, since the training's engine was made


@functools.cache
def watch() -> None:
    """Note what each loader that is iterated from now on has in advance, and time its batches."""
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    original_iter, original_next = DataLoader.__iter__, _BaseDataLoaderIter.__next__

    @functools.wraps(original_iter)
    def iterate(self: Any) -> Any:
        global _in_store
        _in_store = max(_in_store, self.num_workers * (self.prefetch_factor or 0))
        iterator: Any = original_iter(self)
        if "dsat_kind" not in self.__dict__:  # to ask a script's own sampler may cost much
            self.dsat_kind = _kind_of(self.batch_sampler)
        if self.dsat_kind is not None:
            _begun[self.dsat_kind] += 1
        if isinstance(iterator, _BaseDataLoaderIter):
            iterator.dsat_kind = self.dsat_kind  # type: ignore[attr-defined]
        return iterator

    @functools.wraps(original_next)
    def get_batch(self: Any) -> Any:
        global _waited_s
        begin = time.perf_counter()
        try:
            batch = original_next(self)
        finally:
            _waited_s += time.perf_counter() - begin
        if (kind := getattr(self, "dsat_kind", None)) is not None:
            _read[kind] += 1
        return batch

    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    _BaseDataLoaderIter.__next__ = get_batch  # type: ignore[method-assign]


def batches_in_store() -> int:
    """Return the most batches that a loader of this process has made in advance."""
    return _in_store


def waited_s() -> float:
    """Return the seconds that this process has waited for batches of its loaders so far."""
    return _waited_s


def begin_training() -> None:
    """Count batches for the training from here on: its engine is made."""
    _read.clear()


def samples(batch_size: int, micro_steps: int) -> tuple[int | None, int]:
    """Return the samples that the training's loader has on this rank, at most.

    A loader may give each micro step a multiple of its samples, of which the script takes a part:
    those of the whole optimizer step (TRL's GRPO, `GRPOTrainer.get_train_dataloader`).

    Args:
        batch_size: of the training.
        micro_steps: that it made; fewer where steps at the end of an epoch were short.

    Returns:
        Those that micro steps take of an epoch, and all of the epochs that were begun; None and 0
        if no loader of known length has fed most of the steps.
    """
    of_epoch, of_all = 0, 0
    for (size, most), epochs in _begun.items():
        if size % batch_size == 0 and 2 * _read[size, most] >= micro_steps:
            of_epoch = max(most * batch_size // size, of_epoch)
            of_all += epochs * most
    return of_epoch or None, of_all


def _kind_of(batch_sampler: Any) -> Kind | None:
    """Return what is known of a loader's batches; None of data without a length."""
    from torch.utils.data import BatchSampler

    size: Any = getattr(batch_sampler, "batch_size", None)
    try:
        most = (len(batch_sampler) + 1) * size
        if type(batch_sampler) is BatchSampler:  # others share out or repeat their samples
            most = min(most, len(batch_sampler.sampler))  # type: ignore[arg-type]
    except Exception:  # of any kind: torch does not ask for it
        return None
    return size, most
