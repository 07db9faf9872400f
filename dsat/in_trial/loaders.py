"""PyTorch's data loaders: time spent waiting for them, batches in advance, and samples.

As long as a loader feeds from what its workers made in advance, a script looks faster than it is.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

_in_store = 0
_waited_s = 0.0
# The most samples that each loader which was begun has on this rank, by its batch size; None if one
# of them does not tell.
_samples: dict[int, list[int]] | None = {}


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


def samples_in_epoch(batch_size: int) -> int | None:
    """Return how many samples an epoch of the data has on this rank at most.

    Args:
        batch_size: of the loader that the training reads.

    Returns:
        None if it is not known: some data have no length.
    """
    return max(_samples[batch_size]) if _samples and batch_size in _samples else None


def samples_given(batch_size: int) -> int | None:
    """Return how many samples the epochs that were begun have on this rank at most."""
    return sum(_samples[batch_size]) if _samples and batch_size in _samples else None


def _noting(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        global _in_store
        _in_store = max(_in_store, self.num_workers * (self.prefetch_factor or 0))
        _note_samples(self)
        return original(self)

    iterate.dsat_watches = True  # type: ignore[attr-defined]
    return iterate


def _note_samples(loader: Any) -> None:
    global _samples
    size: Any = getattr(loader.batch_sampler, "batch_size", None)
    try:  # accelerate shares the batches of a sampler out; torch's has the samples of this rank
        most = min((len(loader.batch_sampler) + 1) * size, len(loader.sampler))
    except TypeError:
        _samples = None
    else:
        if _samples is not None:
            _samples.setdefault(size, []).append(most)


def _timed(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def get_batch(self: Any) -> Any:
        global _waited_s
        begin = time.perf_counter()
        try:
            return original(self)
        finally:
            _waited_s += time.perf_counter() - begin

    return get_batch
