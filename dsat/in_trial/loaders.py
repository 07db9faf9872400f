"""PyTorch's data loaders: time spent waiting for them, batches in advance, and samples.

As long as a loader feeds from what its workers made in advance, a script looks faster than it is.
"""

from __future__ import annotations

import functools
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


def watch() -> None:
    """Note what each loader that is iterated from now on has in advance, and time its batches."""
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    if not hasattr(DataLoader.__iter__, "dsat_watches"):
        DataLoader.__iter__ = _noting(DataLoader.__iter__)  # type: ignore[method-assign]
        timed: Any = _timed(_BaseDataLoaderIter.__next__)
        _BaseDataLoaderIter.__next__ = timed  # type: ignore[method-assign]


def batches_in_store() -> int:
    """Return the most batches that a loader of this process has made in advance."""
    return _in_store


def waited_s() -> float:
    """Return the seconds that this process has waited for batches of its loaders so far."""
    return _waited_s


def begin_training() -> None:
    """Count batches for the training from here on: its engine is made."""
    _read.clear()


def samples(batch_size: int, micro_steps: int, *, gas: int = 1) -> tuple[int, int] | None:
    """Return the samples that the training's loader has on this rank, at most.

    A loader may give each micro step a whole multiple of its samples: those of several steps, of
    which the script takes a part (TRL's GRPO, `GRPOTrainer.get_train_dataloader`).

    Args:
        batch_size: of the training.
        micro_steps: that it made; fewer where steps at the end of an epoch were short.
        gas: micro batches of an optimizer step; a loader that gives more than one at a time may
            give those of the whole step.

    Returns:
        Those of an epoch, and those of all epochs that were begun, for one of `gas` micro batches.
        None if no loader of known length has fed most of the steps.
    """
    kinds = [
        kind
        for kind, count in (_read | _begun).items()
        if kind[0] % batch_size == 0 and 2 * _read[kind] >= micro_steps
    ]
    if not kinds:
        return None
    parts = {(size, most): most * batch_size // size for size, most in kinds}
    begun = (
        _begun[kind] * part // (gas if kind[0] == batch_size else 1) for kind, part in parts.items()
    )
    return max(parts.values()), sum(begun)


def _noting(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        global _in_store
        _in_store = max(_in_store, self.num_workers * (self.prefetch_factor or 0))
        iterator = original(self)
        if "dsat_kind" not in self.__dict__:  # to ask a script's own sampler may cost much
            self.dsat_kind = _kind_of(self.batch_sampler)
        if self.dsat_kind is not None:
            _begun[self.dsat_kind] += 1
        if isinstance(iterator, _BaseDataLoaderIter):
            iterator.dsat_kind = self.dsat_kind  # type: ignore[attr-defined]
        return iterator

    iterate.dsat_watches = True  # type: ignore[attr-defined]
    return iterate


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


def _timed(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def get_batch(self: Any) -> Any:
        global _waited_s
        begin = time.perf_counter()
        try:
            batch = original(self)
        finally:
            _waited_s += time.perf_counter() - begin
        if (kind := getattr(self, "dsat_kind", None)) is not None:
            _read[kind] += 1
        return batch

    return get_batch
