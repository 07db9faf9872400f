"""Count of the samples that a script really feeds, whatever form its batches have."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsat.errors import InvalidTrial
from dsat.in_trial.conformance import feeds_own

if TYPE_CHECKING:
    import torch

    Leaf = torch.Tensor | torch.nn.utils.rnn.PackedSequence

_TAKEN_FOR_FULL = (
    "throughput takes every micro batch for full, so make sure that the data loader takes its "
    "batch size from the DeepSpeed configuration"
)
UNCOUNTED = (
    "the samples that the script feeds cannot be counted, because no tensor has the micro batch as "
    f"its first or second dimension (packed sequences, perhaps): {_TAKEN_FOR_FULL}"
)
UNSEEN = (
    "the samples that the script feeds cannot be counted, because it calls neither the engine nor "
    f"its model (but parts of it, perhaps): {_TAKEN_FOR_FULL}"
)
OF_ITS_OWN = (
    "the script feeds {rows} samples whatever train_micro_batch_size_per_gpu is ({micro_batch} "
    "here): {advice}"
)
_ADVICE = (
    "take the batch size from engine.train_micro_batch_size_per_gpu(), or name the script's flag: "
    "--arg-mapping train_micro_batch_size_per_gpu={flag}"
)
_DEPTH = 4


Path = tuple[str, ...]


def is_about(warning: str) -> bool:
    """Tell whether a warning is about the samples that were fed."""
    return warning in (UNCOUNTED, UNSEEN) or warning.startswith(OF_ITS_OWN.partition("{")[0])


class SampleCounter:
    """Counts the rows of micro batches by the tensors that have the micro batch as a dimension.

    The first micro step tells which tensors and which of their dimensions. A dimension may have
    that size by chance: what the profile trial saw with another micro batch decides.

    Args:
        micro_batch: the trial's.
        own: that of the user's own configuration, if it is known.
        known: the dimension of the samples by the tensor's place, as the profile trial saw it.
        fed_instead: see `ModelProfile`.

    Attributes:
        dimensions: what the first micro step tells of that, where only one dimension can be meant.
        fed_instead: what it fed instead of the micro batch.
        warning: what a person should know of the first micro step; None if all is well.
    """

    def __init__(
        self,
        micro_batch: int,
        own: int | None,
        known: Mapping[str, int] | None = None,
        fed_instead: Mapping[str, int] | None = None,
    ) -> None:
        self._micro_batch = micro_batch
        self._own = own
        self._known = known or {}
        self._fed_before = fed_instead or {}
        self._carriers: dict[Path, int] | None = None
        self.dimensions: dict[str, int] = {}
        self.fed_instead: dict[str, int] = {}
        self.warning: str | None = None

    @property
    def has_begun(self) -> bool:
        """Tell whether the first micro step was looked at."""
        return self._carriers is not None

    @property
    def counts(self) -> bool:
        """Tell whether the first micro step could be counted."""
        return bool(self._carriers)

    def first(self, leaves: Iterable[tuple[Path, Leaf]]) -> None:
        """Looks at the first micro step.

        Args:
            leaves: the tensors among the arguments of the forward pass.

        Raises:
            InvalidTrial: the script goes on with its own micro batch, so that its throughput would
                be a lie, or there are fewer samples than the micro batch.
        """
        shapes = {path: _shape(leaf) for path, leaf in leaves}
        of_its_size = {path: self._dimensions_of_its_size(path, shapes[path]) for path in shapes}
        self.dimensions = {
            _name(path): found[0] for path, found in of_its_size.items() if len(found) == 1
        }
        for dimension in (0, 1):
            carriers: dict[Path, int] = {
                p: dimension for p, found in of_its_size.items() if dimension in found
            }
            if carriers:
                self._carriers = carriers
                return
        self._carriers = {}
        # A single row is for all samples, or has all of them, packed.
        rows = {_size(s, self._known.get(_name(p), 0)) for p, s in shapes.items()} - {1, None}
        if self._own is not None and feeds_own(list(shapes.values()), self._micro_batch, self._own):
            raise InvalidTrial(
                f"the script feeds {self._own} samples, its own micro batch, although the trial's "
                f"train_micro_batch_size_per_gpu is {self._micro_batch}: {_advice(self._own)}",
                most_samples=self._own if self._own < self._micro_batch else None,
            )
        self.warning = UNCOUNTED
        samples = next(iter(rows)) if len(rows) == 1 else None
        if samples is not None:
            self.fed_instead = {"micro_batch": self._micro_batch, "rows": samples}
            if self._feeds_as_before(samples):
                said = OF_ITS_OWN.format(
                    rows=samples, micro_batch=self._micro_batch, advice=_advice(samples)
                )
                if self._micro_batch != self._own:
                    fewer = samples < self._micro_batch
                    raise InvalidTrial(said, most_samples=samples if fewer else None)
                self.warning = said
                at = {path: self._known.get(_name(path), 0) for path in shapes}
                self._carriers = {p: d for p, d in at.items() if _size(shapes[p], d) == samples}
                return
        if samples is not None and samples < self._micro_batch:
            raise InvalidTrial(
                f"the first batch has {samples} samples, fewer than the micro batch of "
                f"{self._micro_batch}: there are no more data on a rank, or the data loader has a "
                "batch size of its own",
                most_samples=samples,
            )

    def _feeds_as_before(self, samples: int) -> bool:
        """Tell whether the profile trial was fed as many, with another micro batch."""
        before = self._fed_before
        return before.get("rows") == samples and before["micro_batch"] != self._micro_batch

    def _dimensions_of_its_size(self, path: Path, shape: tuple[int, ...]) -> list[int]:
        known = self._known.get(_name(path))
        may_be = (0, 1) if known is None else (known,)
        return [d for d in may_be if _size(shape, d) == self._micro_batch]

    def rows(self, leaves: Iterable[tuple[Path, Leaf]]) -> int | None:
        """Rows of a micro step; None if it cannot be counted."""
        if not self._carriers:
            return None
        sizes = [
            _size(_shape(leaf), self._carriers[path])
            for path, leaf in leaves
            if path in self._carriers
        ]
        return max((size for size in sizes if size is not None), default=None)


def _advice(fed: int) -> str:
    """Tell how the batch that a script feeds can follow the trial's."""
    return _ADVICE.format(flag=batch_flag(sys.argv[1:], fed) or "--batch-size")


def batch_flag(args: Sequence[str], fed: int) -> str | None:
    """Return the flag of a script that sets its batch size, by name; None if it was given none.

    Args:
        args: of the script.
        fed: samples that it feeds; a flag with this value comes first.
    """
    named = {}
    for word, after in zip(args, [*args[1:], ""], strict=False):
        flag, has_value, value = word.partition("=")
        if flag.startswith("--") and "batch" in flag.lower():
            named[flag] = value if has_value else after
    of_that_value = [flag for flag, value in named.items() if value == str(fed)]
    return next(iter([*of_that_value, *named]), None)


def leaves_of(values: Iterable[Any]) -> Iterator[tuple[Path, Leaf]]:
    """All tensors among values that have a dimension, each with its place.

    Looks into lists, tuples, mappings (those of transformers among them), dataclasses and other
    objects that hold tensors. Named arguments are to be given as a mapping.
    """
    for place, value in enumerate(values):
        yield from _leaves(value, (str(place),), _DEPTH)


def elements_of(leaves: Iterable[tuple[Path, Leaf]]) -> int:
    """The elements of all of them: how much there is to work on, the padding included."""
    import torch

    total = 0
    for _, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            total += sum(part.numel() for part in leaf.unbind())
        else:
            total += leaf.data.numel()
    return total


def _leaves(value: Any, path: Path, depth: int) -> Iterator[tuple[Path, Leaf]]:
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_nested or value.dim():
            yield path, value
        return
    if depth == 0 or isinstance(value, (str, bytes, type, torch.nn.Module)):
        return
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        yield path, value
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
        yield from _leaves(part, (*path, str(name)), depth - 1)


def _name(path: Path) -> str:
    return ".".join(path)


def _shape(leaf: Leaf) -> tuple[int, ...]:
    """Return the shape; for nested tensors and packed sequences only the number of sequences."""
    import torch

    if not isinstance(leaf, torch.Tensor):
        return (int(leaf.batch_sizes[0]),)
    return (leaf.size(0),) if leaf.is_nested else tuple(leaf.shape)


def _size(shape: tuple[int, ...], dimension: int) -> int | None:
    return shape[dimension] if dimension < len(shape) else None
