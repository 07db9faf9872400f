"""PyTorch's data loaders: time spent waiting for them, batches in advance, and samples.

As long as a loader feeds from what its workers made in advance, a script looks faster than it is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

# What is known of a loader: the batch size, and the most samples of an epoch on this rank.
Kind = tuple[int, int]
_in_store = 0
_waited_s = 0.0
_begun: Counter[Kind] = Counter()  # epochs
_read: Counter[Kind] = Counter()  # batches, since the training's engine was made


def begin_epoch(loader: Any, iterator: Any) -> None:
    """Count an epoch of a loader, by its iterator, and the batches that it prepares in advance."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    global _in_store
    _in_store = max(_in_store, loader.num_workers * (loader.prefetch_factor or 0))
    if "dsat_kind" not in loader.__dict__:  # to ask a script's own sampler may cost much
        loader.dsat_kind = _kind_of(loader.batch_sampler)
    if loader.dsat_kind is not None:
        _begun[loader.dsat_kind] += 1
    if isinstance(iterator, _BaseDataLoaderIter):
        iterator.dsat_kind = loader.dsat_kind  # type: ignore[attr-defined]


def wait_for_batch(iterator: Any, get: Callable[[], Any]) -> Any:
    """Return the next batch of an iterator; count it, and the time that it takes."""
    global _waited_s
    begin = time.perf_counter()
    try:
        batch = get()
    finally:
        _waited_s += time.perf_counter() - begin
    if (kind := getattr(iterator, "dsat_kind", None)) is not None:
        _read[kind] += 1
    return batch


def batches_in_store() -> int:
    """Return the largest number of batches that a loader prepared in advance."""
    return _in_store


def waited_s() -> float:
    """Return the seconds that this process has waited for batches."""
    return _waited_s


def begin_training() -> None:
    """Start counting batches for the training, whose engine now exists."""
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
    """Return batch size and number of samples of a loader; None if it has no length."""
    from torch.utils.data import BatchSampler

    size: Any = getattr(batch_sampler, "batch_size", None)
    try:
        most = (len(batch_sampler) + 1) * size
        if type(batch_sampler) is BatchSampler:  # others share out or repeat their samples
            most = min(most, len(batch_sampler.sampler))  # type: ignore[arg-type]
    except Exception:  # of any kind: torch does not ask for it
        return None
    return size, most
