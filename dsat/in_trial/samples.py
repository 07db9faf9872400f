"""How many samples a script really feeds, whatever form its batches have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dsat.errors import InvalidTrial
from dsat.in_trial.conformance import feeds_own

UNCOUNTED = (
    "the samples that the script feeds cannot be counted, because no tensor has the micro batch as "
    "its first or second dimension (packed sequences, perhaps): throughput takes every micro batch "
    "for full, so make sure that the data loader takes its batch size from the DeepSpeed "
    "configuration"
)
_DEPTH = 4

Path = tuple[str, ...]


class SampleCounter:
    """Counts the rows of micro batches by the tensors that have the micro batch as a dimension.

    Which tensors those are, and which of their dimensions it is, the first micro step tells.

    Args:
        micro_batch: the trial's.
        own: that of the user's own configuration, if it is known.
    """

    def __init__(self, micro_batch: int, own: int | None) -> None:
        self._micro_batch = micro_batch
        self._own = own
        self._carriers: dict[Path, int] | None = None

    @property
    def counts(self) -> bool:
        """Whether the first micro step could be counted."""
        return bool(self._carriers)

    def first(self, values: Iterable[Any]) -> None:
        """Looks at the first micro step.

        Args:
            values: arguments of the forward pass.

        Raises:
            InvalidTrial: the script goes on with its own micro batch, so that its throughput would
                be a lie, or there are fewer samples than the micro batch.
        """
        shapes = dict(shapes_of(values))
        for dimension in (0, 1):
            found = {
                p: dimension for p, s in shapes.items() if _size(s, dimension) == self._micro_batch
            }
            if found:
                self._carriers = found
                return
        self._carriers = {}
        # A single row is for all samples, or has all of them, packed.
        rows = {shape[0] for shape in shapes.values()} - {1}
        if self._own is not None and feeds_own(list(shapes.values()), self._micro_batch, self._own):
            raise InvalidTrial(
                f"the script feeds {self._own} samples, its own micro batch, although the trial's "
                f"train_micro_batch_size_per_gpu is {self._micro_batch}: take the batch size from "
                "engine.train_micro_batch_size_per_gpu(), or name the script's flag: --arg-mapping "
                "train_micro_batch_size_per_gpu=--batch-size"
            )
        if len(rows) == 1 and max(rows) < self._micro_batch:
            samples = max(rows)
            raise InvalidTrial(
                f"the first batch has {samples} samples, fewer than the micro batch of "
                f"{self._micro_batch}: there are no more data on a rank, or the data loader has a "
                "batch size of its own",
                most_samples=samples,
            )

    def rows(self, values: Iterable[Any]) -> int | None:
        """Rows of a micro step; None if it cannot be counted."""
        if not self._carriers:
            return None
        sizes = [
            _size(shape, self._carriers[path])
            for path, shape in shapes_of(values)
            if path in self._carriers
        ]
        return max((size for size in sizes if size is not None), default=None)


def shapes_of(values: Iterable[Any]) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """The shapes of all tensors among values that have a dimension, each with its place.

    Looks into lists, tuples, mappings (those of transformers among them), dataclasses and other
    objects that hold tensors.
    """
    for place, value in enumerate(values):
        yield from _shapes(value, (str(place),), _DEPTH)


def _shapes(value: Any, path: Path, depth: int) -> Iterator[tuple[Path, tuple[int, ...]]]:
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_nested:
            yield path, (value.size(0),)
        elif value.dim():
            yield path, tuple(value.shape)
        return
    if depth == 0 or isinstance(value, (str, bytes, type, torch.nn.Module)):
        return
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        yield path, (int(value.batch_sizes[0]),)
        return
    inside: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, (list, tuple)):
        inside = enumerate(value)
    elif dataclasses.is_dataclass(value):
        inside = ((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value))
    elif type(value).__module__ != "builtins" and hasattr(value, "__dict__"):
        inside = vars(value).items()
    else:
        return
    for name, part in inside:
        yield from _shapes(part, (*path, str(name)), depth - 1)


def _size(shape: tuple[int, ...], dimension: int) -> int | None:
    return shape[dimension] if dimension < len(shape) else None
