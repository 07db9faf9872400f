"""Detection of losses over pairs of samples: CLIP, SimCSE, negatives within the batch."""

from __future__ import annotations

from collections import deque
from typing import Any

_MOST_NODES = 300  # of the graph, nearest to the loss, where samples are compared
_VIEWS = ("TBackward", "Transpose", "Permute", "View", "Expand", "Unsafe", "Clone", "ToCopy")
_PARAMETER = "AccumulateGrad"


def compares_samples(loss: Any, micro_batch: int, ranks: int) -> bool:
    """Return whether a loss multiplies outputs of all pairs of samples.

    The loss's graph then has a product of two computed matrices (not parameters) with one row, or
    two (two views), per sample of the micro batch of one rank or all. There are as many columns, or
    a multiple: twice, or once or twice per rank (hard negatives, samples of other ranks).
    """
    waiting = deque([getattr(loss, "grad_fn", None)])
    known: set[Any] = set()
    rows = {number * micro_batch for number in (1, 2, ranks, 2 * ranks)}
    while waiting and micro_batch > 1 and len(known) < _MOST_NODES:
        node = waiting.popleft()
        if node is None or node in known:
            continue
        known.add(node)
        size = _size_of_product(node)
        if size is not None and size[0] in rows and size[1] / size[0] in {1, 2, ranks, 2 * ranks}:
            return True
        waiting.extend(function for function, _ in node.next_functions)
    return False


def _size_of_product(node: Any) -> tuple[int, int] | None:
    """Return rows and columns of a product of two computed matrices; None for other nodes."""
    name = node.name()
    if not name.startswith(("MmBackward", "BmmBackward")):
        return None
    operands = [function for function, _ in node.next_functions]
    if len(operands) != 2 or any(each is None or _is_parameter(each) for each in operands):
        return None
    try:
        if name.startswith("Mm"):
            return int(node._saved_self_sym_sizes[0]), int(node._saved_mat2_sym_sizes[1])
        first, second = node._saved_self.shape, node._saved_mat2.shape
    except (RuntimeError, AttributeError):  # the graph has released them
        return None
    return (int(first[1]), int(second[2])) if first[0] == 1 else None  # of a batch of one


def _is_parameter(node: Any) -> bool:
    """Return whether a node is a parameter or a constant, or a view of one."""
    while node is not None and node.name().startswith(_VIEWS):
        node = node.next_functions[0][0]
    return node is None or node.name().endswith(_PARAMETER)
