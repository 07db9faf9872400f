"""Detection of losses that compare all pairs of samples in a batch, as in CLIP and SimCSE."""

from __future__ import annotations

from collections import deque
from typing import Any

_MOST_NODES = 300  # nodes of the graph to search; samples are compared close to the loss
_VIEWS = (
    *("TBackward", "Transpose", "Permute", "View", "Expand", "Unsafe", "Clone", "ToCopy"),
    *("Unsqueeze", "Slice", "Select"),
)
_PARAMETER = "AccumulateGrad"
_DISTANCES = ("CdistBackward", "EuclideanDistBackward")
_BY_ELEMENT = ("MulBackward", "SubBackward", "AddBackward", "DivBackward")
_MOST_NORMALIZED = 4  # nodes between a product by elements and the expansion of an operand


def compares_samples(loss: Any, micro_batch: int, ranks: int) -> bool:
    """Return whether a loss compares outputs of all pairs of samples.

    The graph of such a loss has a matrix with an element for each pair: a product of two matrices
    that are not parameters, distances between their rows, or an operation by elements on a column
    and a row (`z[:, None] * z[None]`). With n samples on one rank or on all ranks, the matrix has
    n rows, or 2n for two views. It has as many columns as rows, twice as many (hard negatives), or
    either number for each rank (samples of other ranks).
    """
    queue = deque([getattr(loss, "grad_fn", None)])
    visited: set[Any] = set()
    rows = {number * micro_batch for number in (1, 2, ranks, 2 * ranks)}
    while queue and micro_batch > 1 and len(visited) < _MOST_NODES:
        node = queue.popleft()
        if node is None or node in visited:
            continue
        visited.add(node)
        size = _size_of_pairs(node)
        if size is not None and size[0] in rows and size[1] / size[0] in {1, 2, ranks, 2 * ranks}:
            return True
        queue.extend(function for function, _ in node.next_functions)
    return False


def _size_of_pairs(node: Any) -> tuple[int, int] | None:
    """Return rows and columns of a node's matrix of pairs; None if the node compares no outputs."""
    name, operands = node.name(), node.next_functions
    if not name.startswith(("MmBackward", "BmmBackward", *_DISTANCES, *_BY_ELEMENT)):
        return None
    if len(operands) != 2 or any(op is None or _is_parameter(op) for op, _ in operands):
        return None
    try:
        if name.startswith("Mm"):
            return int(node._saved_self_sym_sizes[0]), int(node._saved_mat2_sym_sizes[1])
        if name.startswith("Bmm"):
            first, second = node._saved_self.shape, node._saved_mat2.shape
            return (int(first[1]), int(second[2])) if first[0] == 1 else None  # one product
        first, second = (_shape_before_expansion(*op) for op in operands)
    except (RuntimeError, AttributeError):  # the graph has released them, or an older torch
        return None
    if name.startswith(_DISTANCES):
        return (first[-2], second[-2]) if {*first[:-2], *second[:-2]} <= {1} else None
    if min(len(first), len(second)) < 2:
        return None
    rows, columns = (first, second) if first[1] == 1 else (second, first)
    return (rows[0], columns[1]) if rows[1] == 1 and columns[0] == 1 else None


def _shape_before_expansion(node: Any, index: int) -> tuple[int, ...]:
    """Return the shape of a node's output, before any expansion along pairs."""
    shape = tuple(map(int, node._input_metadata[index].shape))
    source_shape = shape
    for _ in range(_MOST_NORMALIZED):  # a cosine divides by norms after the expansion
        if 1 in source_shape[:2] or not node.next_functions or node.next_functions[0][0] is None:
            break
        node, index = node.next_functions[0]
        source_shape = tuple(map(int, node._input_metadata[index].shape))
        if len(source_shape) != len(shape):
            return shape
    return source_shape if 1 in source_shape[:2] else shape


def _is_parameter(node: Any) -> bool:
    """Return whether a node is a parameter or a constant, or a view of one."""
    while node is not None and node.name().startswith(_VIEWS):
        node = node.next_functions[0][0]
    return node is None or node.name().endswith(_PARAMETER)
