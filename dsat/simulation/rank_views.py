"""Views of a flat tensor's parts, one per rank, at the cost of a single view.

With hundreds of ranks, DeepSpeed's loops over ranks would take most of a simulation's time. Only
sizes matter there, so one view stands for all parts of the same size.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any

import torch

_SMALLEST = 2**10  # elements of a part; a script may look at the values of smaller tensors


class RankViews:
    """Views that stand for parts of flat tensors.

    Only the last view is remembered, since a loop over ranks requests its parts in a row. It is
    held by a weak reference, so that it keeps no storage alive.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._of: Callable[[], Any] = lambda: None
        self._view: Callable[[], Any] = lambda: None
        self._size = self._start = self._length = 0
        self._is_part = False

    def install(self) -> None:
        """Patch torch for the rest of the process."""
        narrow, getitem = torch.Tensor.narrow, torch.Tensor.__getitem__
        numel, cat = torch.Tensor.numel, torch.cat

        def narrow_once(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) != 3 or kwargs or type(args[1]) is not int:
                return narrow(tensor, *args, **kwargs)
            return self._find(tensor, *args[1:], lambda: narrow(tensor, *args))

        def getitem_once(tensor: Any, index: Any) -> Any:
            is_part = type(index) is slice and index.step is None
            if not is_part or not type(index.start) is type(index.stop) is int:
                return getitem(tensor, index)
            length = index.stop - index.start
            return self._find(tensor, index.start, length, lambda: getitem(tensor, index))

        def plain_numel(tensor: Any) -> int:
            with torch._C.DisableTorchFunction():
                return numel(tensor)

        def cat_once(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            alone = not (args or kwargs) and len(tensors) > 1
            return cat(_merge_repeats(tensors) if alone else tensors, *args, **kwargs)

        torch.Tensor.narrow, torch.Tensor.__getitem__ = narrow_once, getitem_once  # type: ignore[assignment,method-assign]
        torch.Tensor.numel, torch.cat = plain_numel, cat_once  # type: ignore[assignment,method-assign]

    def _find(self, tensor: Any, start: int, length: int, make: Callable[[], Any]) -> Any:
        if self._of() is tensor and length == self._length:
            is_same = start == self._start or (self._is_part and 0 <= start <= self._size - length)
            view = self._view()
            if is_same and view is not None:
                return view
        view = make()
        if tensor.dim() == 1 and not tensor.requires_grad and 0 <= start <= len(tensor) - length:
            self._of, self._view = weakref.ref(tensor), weakref.ref(view)
            self._size, self._start, self._length = len(tensor), start, length
            self._is_part = length >= _SMALLEST and -(-self._size // self._ranks) == length
        return view


def _merge_repeats(tensors: Any) -> list[torch.Tensor]:
    """Merge repetitions of a flat tensor into one view of their total size, to concatenate less."""
    counts = collections.Counter(map(id, tensors))
    if len(counts) == len(tensors) or any(tensor.dim() != 1 for tensor in tensors):
        return list(tensors)
    by_id = {id(tensor): tensor for tensor in tensors}
    return [by_id[key].as_strided((n * len(by_id[key]),), (0,)) for key, n in counts.items()]
