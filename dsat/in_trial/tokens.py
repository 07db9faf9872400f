"""Counts of tokens, and lengths of sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsat.values.outcome import SequenceLengths

if TYPE_CHECKING:
    from dsat.in_trial.samples import Leaf, Path

_BY_NAME = "input_ids"
_MASK = "attention_mask"


@dataclass(frozen=True)
class Fed:
    """Tokens of one call of the model.

    Attributes:
        tokens: their number, on whatever device it was counted; None if there are none to be seen.
        length: of the longest sequence, the padding included; None where samples share a row.
    """

    tokens: Any = None
    length: int | None = None


class TokenCounter:
    """Counts the tokens of micro batches.

    Tokens are the elements of an integer tensor of two dimensions, batch and length (in either
    order): the one called `input_ids`, or else the model's first input if it is such a tensor.
    Nested integer tensors and packed sequences count as well. Where an `attention_mask` of the same
    shape goes with it, only what it does not mask counts, since padding is no progress; a row that
    has all samples packed needs no mask for that.

    Args:
        micro_batch: the trial's, by which the batch's dimension is told from the length.
    """

    def __init__(self, micro_batch: int) -> None:
        self._micro_batch = micro_batch
        self._lengths: list[int] = []

    def count(self, leaves: Sequence[tuple[Path, Leaf]]) -> Fed:
        """The tokens of one call; nothing is waited for on an asynchronous device.

        Args:
            leaves: the tensors among the arguments of the forward pass.
        """
        fed = self._count(leaves)
        if fed.length is not None:
            self._lengths.append(fed.length)
        return fed

    def lengths(self, engine: Any) -> list[float]:
        """Return figures that ranks combine by their maximum; 0 for unknown ones.

        They are the negative of the shortest length so far, the longest, and the model's maximum.
        """
        if not self._lengths:
            return [-math.inf, 0.0, 0.0]
        return [-min(self._lengths), max(self._lengths), float(_longest_of(engine.module))]

    def _count(self, leaves: Sequence[tuple[Path, Leaf]]) -> Fed:
        import torch

        named = [leaf for path, leaf in leaves if path[-1] == _BY_NAME]
        masks = [leaf for path, leaf in leaves if path[-1] == _MASK and _is_plain(leaf)]
        for leaf in [*named, *(leaf for _, leaf in leaves[:1])]:
            if isinstance(leaf, torch.nn.utils.rnn.PackedSequence):
                if _is_of_ids(leaf.data, dimensions=1):
                    return Fed(leaf.data.numel(), len(leaf.batch_sizes))
            elif leaf.is_nested:
                parts = leaf.unbind()
                if parts and _is_of_ids(parts[0], dimensions=1):
                    sizes = [part.numel() for part in parts]
                    return Fed(sum(sizes), max(sizes))
            elif _is_of_ids(leaf, dimensions=2) and max(leaf.shape) > 1:
                mask = next((mask.data for mask in masks if mask.data.shape == leaf.shape), None)
                tokens = leaf.numel() if mask is None else torch.count_nonzero(mask)
                return Fed(tokens, self._length(tuple(leaf.shape)))
        return Fed()

    def _length(self, shape: tuple[int, ...]) -> int | None:
        rows, length = shape
        if rows == self._micro_batch:
            return length
        if length == self._micro_batch:
            return rows
        # A short batch at the end of an epoch, pairs of sequences, or all samples in one row.
        return length if rows > 1 else None


def over_ranks(found: Sequence[float]) -> SequenceLengths | None:
    """The lengths of which this is the maximum over the ranks; None if there are none."""
    shortest, longest, most = found
    if not longest:
        return None
    return SequenceLengths(round(-shortest), round(longest), round(most) or None)


def _is_plain(leaf: Leaf) -> bool:
    import torch

    return isinstance(leaf, torch.Tensor) and not leaf.is_nested


def _is_of_ids(tensor: Any, *, dimensions: int) -> bool:
    import torch

    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return is_integer and tensor.dtype is not torch.bool and tensor.dim() == dimensions


def _longest_of(model: Any) -> int:
    """Return `max_position_embeddings` of a transformers model, wrapped or not; 0 of any other."""
    for module in model.modules():
        most = getattr(getattr(module, "config", None), "max_position_embeddings", None)
        if isinstance(most, int) and most > 0:
            return most
    return 0
