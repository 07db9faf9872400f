"""PyTorch's data loaders: time spent waiting for them, batches in advance, samples of an epoch.

As long as a loader feeds from what its workers made in advance, a script looks faster than it is.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

_in_store = 0
_waited_s = 0.0
_samples: dict[int, int] = {}  # the most that a loader has, by its batch size


def watch() -> None:
    """Note the size of each loader that is iterated from now on, and time its batches."""
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


def samples_of_epoch(batch_size: int) -> int:
    """Return the most samples of an epoch that a loader of such batches has; 0 if unknown."""
    return _samples.get(batch_size, 0)


def _noting(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        global _in_store
        _in_store = max(_in_store, self.num_workers * (self.prefetch_factor or 0))
        found = _samples_of(self)
        if found is not None:
            batch_size, samples = found
            _samples[batch_size] = max(samples, _samples.get(batch_size, 0))
        return original(self)

    iterate.dsat_watches = True  # type: ignore[attr-defined]
    return iterate


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


def _samples_of(loader: Any) -> tuple[int, int] | None:
    """Return a loader's batch size and the samples that this process gets of it in an epoch.

    Exact for PyTorch's own batches of a sampler; of other batches, as accelerate's, no less than it
    gets. None if it is not known, as of a stream.
    """
    from torch.utils.data import BatchSampler

    batches = loader.batch_sampler
    size = getattr(batches, "batch_size", None)
    if not isinstance(size, int):
        return None
    try:
        if type(batches) is BatchSampler:
            samples = len(batches.sampler)  # type: ignore[arg-type]
        else:
            dropped = size - 1 if getattr(batches, "drop_last", False) else 0
            samples = len(batches) * size + dropped
    except (TypeError, NotImplementedError, AttributeError):
        return None  # by torch's contract: a sampler without a length raises any of these
    return (size, samples) if samples > 0 else None
