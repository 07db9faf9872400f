"""PyTorch's data loaders: time spent waiting for them, batches prepared in advance, and samples.

While a loader returns batches that its workers have prepared in advance, a script seems to be
faster than it is.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from dsat.in_trial.adapters.calls import Call

# A kind of loader: its batch size, and an upper bound on its samples per epoch on this rank.
Kind = tuple[int, int]
batches_in_store = 0  # the most that any loader prepares in advance
waited_s = 0.0  # for batches, in this process
_epochs: Counter[Kind] = Counter()  # begun
_batches: Counter[Kind] = Counter()  # since the training's engine was made


def begin_epoch(call: Call) -> Any:
    """Record how many batches a loader prepares in advance, and the length of its epoch."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    global batches_in_store
    loader, iterator = call.owner, call.proceed()
    num_stored = loader.num_workers * (loader.prefetch_factor or 0)
    batches_in_store = max(batches_in_store, num_stored)
    if "dsat_kind" not in loader.__dict__:  # once: a script's sampler may compute its length slowly
        loader.dsat_kind = _kind_of(loader.batch_sampler)
    if loader.dsat_kind is not None:
        _epochs[loader.dsat_kind] += 1
    if isinstance(iterator, _BaseDataLoaderIter):
        iterator.dsat_kind = loader.dsat_kind  # type: ignore[attr-defined]
    return iterator


def get_batch(call: Call) -> Any:
    """Measure how long the script waits for a batch."""
    global waited_s
    begin = time.perf_counter()
    try:
        batch = call.proceed()
    finally:
        waited_s += time.perf_counter() - begin
    if (kind := getattr(call.owner, "dsat_kind", None)) is not None:
        _batches[kind] += 1
    return batch


def begin_training() -> None:
    """Restart the count of batches; called when the engine that trains is made."""
    _batches.clear()


def samples(batch_size: int, micro_steps: int) -> tuple[int | None, int]:
    """Return upper bounds on the samples of the training's loader on this rank.

    In each micro step, a loader may load several micro batches, of which the script uses one: TRL's
    GRPO loads a whole optimizer step's (`GRPOTrainer.get_train_dataloader`).

    Args:
        batch_size: the micro batch.
        micro_steps: upper bound on the micro steps so far; the last optimizer step of an epoch may
            have fewer than the others.

    Returns:
        The samples that the micro steps use in one epoch, and in all epochs begun so far.
        None and 0 if no loader of known length loaded batches for at least half of the micro steps.
    """
    epoch_samples, all_samples = 0, 0
    for (size, length), epochs in _epochs.items():
        if size % batch_size == 0 and 2 * _batches[size, length] >= micro_steps:
            num_samples = length * batch_size // size
            epoch_samples = max(num_samples, epoch_samples)
            all_samples += epochs * num_samples
    return epoch_samples or None, all_samples


def _kind_of(batch_sampler: Any) -> Kind | None:
    """Return the kind of the loader that uses a batch sampler; None if its length is unknown."""
    from torch.utils.data import BatchSampler

    size: Any = getattr(batch_sampler, "batch_size", None)
    try:
        length = (len(batch_sampler) + 1) * size
        if type(batch_sampler) is BatchSampler:  # other classes distribute or repeat samples
            length = min(length, len(batch_sampler.sampler))  # type: ignore[arg-type]
    except Exception:  # any error: torch itself needs no length
        return None
    return size, length
