"""Detection of losses that compare all pairs of samples in a batch, as in CLIP and SimCSE."""

from __future__ import annotations

from collections import deque
from typing import Any

_MOST_NODES = 300  # nodes of the graph to search; samples are compared close to the loss
_VIEWS = ("TBackward", "Transpose", "Permute", "View", "Expand", "Unsafe", "Clone", "ToCopy")
_PARAMETER = "AccumulateGrad"


def compares_samples(loss: Any, micro_batch: int, ranks: int) -> bool:
    """Return whether a loss multiplies outputs of all pairs of samples.

    Such a loss has a product of two computed matrices, which are not parameters, in its graph. Each
    sample of one rank, or of all ranks, has one row, or two rows for two views. The columns are as
    many as the rows, or a multiple: twice as many (hard negatives), or once or twice as many for
    each rank (samples of other ranks).
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
    return (int(first[1]), int(second[2])) if first[0] == 1 else None  # one product


def _is_parameter(node: Any) -> bool:
    """Return whether a node is a parameter or a constant, or a view of one."""
    while node is not None and node.name().startswith(_VIEWS):
        node = node.next_functions[0][0]
    return node is None or node.name().endswith(_PARAMETER)
