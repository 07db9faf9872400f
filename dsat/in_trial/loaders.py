"""PyTorch's data loaders: time spent waiting for them, and batches in advance.

As long as a loader feeds from what its workers made in advance, a script looks faster than it is.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

_in_store = 0
_waited_s = 0.0


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


def _noting(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        global _in_store
        _in_store = max(_in_store, self.num_workers * (self.prefetch_factor or 0))
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
