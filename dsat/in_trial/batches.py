"""Counts of samples and tokens in batches of any form."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsat.errors import InvalidTrial
from dsat.in_trial import loaders
from dsat.in_trial.adapters.trial import TRIAL
from dsat.in_trial.agreement import Ranks
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.script_flags import find_batch_flag
from dsat.values import format as fmt
from dsat.values.outcome import SequenceLengths

if TYPE_CHECKING:
    import torch

    Leaves = Mapping[str, torch.Tensor]
    Shape = tuple[int, ...]

_ASSUMED_FULL = (
    "Throughput then assumes full micro batches. Make sure that the data loader takes its batch "
    "size from the DeepSpeed configuration"
)
UNCOUNTED = (
    "the samples that the script feeds cannot be counted: no tensor always has the micro batch as "
    f"its first or second dimension (packed sequences, or batches by tokens). {_ASSUMED_FULL}"
)
DROPPED = (
    "many batches have fewer samples than the micro batch, perhaps because the data loader drops "
    "some. Throughput counts the samples that the script feeds"
)
UNSEEN = (
    "the samples that the script feeds cannot be counted: it calls neither the engine nor the "
    f"whole model, but perhaps parts of the model. {_ASSUMED_FULL}"
)
IGNORES_BATCH = (
    "the script feeds {samples} whatever train_micro_batch_size_per_gpu is ({micro_batch} "
    "here): {advice}"
)
_ADVICE = "take the batch size from engine.train_micro_batch_size_per_gpu()"
_ADVICE_WITH_FLAG = f"{_ADVICE}, or add --arg-mapping train_micro_batch_size_per_gpu={{flag}}"
TOO_FEW = (
    "the first batch has {samples}, fewer than the micro batch of {micro_batch}: there are no more "
    "data on a rank, or the data loader has a batch size of its own"
)
OWN_ACCUMULATION = (
    "each optimizer step of the script takes {k} times as many micro batches as "
    "gradient_accumulation_steps, so the global batch is {k} times train_batch_size. To let dsat "
    "tune accumulation, {advice}. Change nothing if these micro batches are parts of one batch, "
    "such as real and generated samples"
)
STEP_ALWAYS = (
    "set gradient_accumulation_steps to their number, call engine.step() after every micro batch, "
    "and do not divide the loss, which DeepSpeed does"
)
OWN_BOUNDARY = (
    "take the number of micro batches between boundaries (set_gradient_accumulation_boundary) from "
    "engine.gradient_accumulation_steps(), or, with a Trainer, set gradient_accumulation_steps in "
    "the call of TrainingArguments, not afterwards"
)
_FEWEST_KEPT = 0.75  # a loader that drops samples keeps at least this share
_DEPTH = 4  # nested containers that are searched for tensors
_LARGE = 256  # values; searching them takes some tenths of a millisecond


def is_about(warning: str) -> bool:
    """Return whether a warning is about the samples or the accumulation of the script."""
    starts = tuple(text.partition("{")[0] for text in (IGNORES_BATCH, OWN_ACCUMULATION, TOO_FEW))
    return warning in (UNCOUNTED, DROPPED, UNSEEN) or warning.startswith(starts)


@dataclass(frozen=True)
class Fed:
    """Contents of one call of the model.

    Attributes:
        rows: number of samples; None if they cannot be counted.
        tokens: number of tokens, perhaps as a tensor on a device; None if there are none.
        elements: number of elements of all tensors.
    """

    rows: int | None
    tokens: Any
    elements: int


class BatchCounter:
    """Counter of the samples and tokens of micro batches.

    Samples are the rows of tensors that have the micro batch as a dimension. The first call decides
    which tensors and dimensions these are. Another dimension may have the same size by chance, so
    dimensions that the profile trial found with another micro batch take precedence. Data loaders
    that fill batches by tokens vary the number of samples; `check` detects this.

    Tokens are the elements of two-dimensional integer tensors: those called `input_ids` (several
    for pairs of texts), or else the model's first tensor. Elements masked by an `attention_mask`
    of the same shape do not count.

    Attributes:
        dimensions: the sample dimension of each tensor by its place in the arguments, such as
            `1.input_ids`, where the first call is unambiguous.
        fed_instead: as in `ModelProfile`.
        fixed_batch: as in `Outcome`.
        warning: warning about the samples of the calls so far; None if all is well.
    """

    def __init__(self, spec: MeterSpec) -> None:
        self._micro_batch = spec.micro_batch
        self._own_micro_batch = spec.options.own_micro_batch
        self._known_dims = spec.batch_dimensions  # sample dimensions in the profile trial
        self._profile_batch = spec.fed_instead  # in the profile trial
        self._parts = spec.parallelism.sequence  # devices that share a sequence
        self._carriers: dict[str, int] | None = None  # the sample dimension by place
        self._may_be_pairs = False
        self._rows: list[int | None] = []  # of each call
        self._finder = LeafFinder()
        self._lengths: list[int] = []
        self.dimensions: dict[str, int] = {}
        self.fed_instead: dict[str, int] = {}
        self.fixed_batch: int | None = None
        self.warning: str | None = None

    def count(self, values: Iterable[Any]) -> Fed:
        """Count samples and tokens in a forward pass's arguments, without waiting for a device."""
        leaves = self._finder.find(values)
        shapes = {place: _shape(leaf) for place, leaf in leaves.items()}
        if self._carriers is None:
            self._carriers = self._find_carriers(shapes)
        rows = self._count_rows(shapes, self._carriers)
        self._rows.append(rows)
        tokens, length = self._tokens(leaves)
        if length is not None:
            self._lengths.append(length)
        return Fed(rows, tokens, elements=sum(leaf.numel() for leaf in leaves.values()))

    def check(self, ranks: Ranks) -> int | None:
        """Decide whether the samples of the calls so far can be counted; a collective call.

        Returns:
            The number of samples of a full micro batch; None if samples cannot be counted. If the
            script drops samples, all its micro batches count as full.

        Raises:
            InvalidTrial: all full batches have the same number of samples, which is not the micro
                batch. For the user's own micro batch, this is only a warning.
        """
        drops = self._drops()
        min_rows = min((count for count in self._rows if count is not None), default=math.inf)
        maxima = ranks.maximum([float(not drops and self._varies()), float(drops), -min_rows])
        varies, drops = maxima[0] > 0, maxima[1] > 0
        self.warning, self.fed_instead, self.fixed_batch = None, {}, None
        if drops and not varies:
            self.warning = DROPPED
            return int(-maxima[2])
        if not self._rows or (self._carriers and not varies):
            return self._micro_batch
        self.warning = UNCOUNTED
        samples, profile = self._rows[0], self._profile_batch
        if varies or samples is None:
            return None
        if (refusal := self.refuse_own()) is not None:
            raise refusal
        if samples == 1:  # one row that packs all samples, or is shared by them
            return None
        self.fed_instead = {"micro_batch": self._micro_batch, "rows": samples}
        if profile.get("rows") == samples and profile["micro_batch"] != self._micro_batch:
            refusal = self._refusal(samples)
        elif samples < self._micro_batch:
            refusal = InvalidTrial(
                TOO_FEW.format(samples=fmt.count(samples, "sample"), micro_batch=self._micro_batch),
                most_samples=samples,
            )
        else:
            return None
        if self._micro_batch != self._own_micro_batch:
            raise refusal
        self.warning = str(refusal)
        return samples

    def refuse_own(self) -> InvalidTrial | None:
        """Return an error if the first call has the user's micro batch instead of the trial's."""
        samples = self._rows[0] if self._rows else None
        if samples is None or self._own_micro_batch != samples or samples == self._micro_batch:
            return None
        return None if self._may_be_pairs else self._refusal(samples)

    def lengths(
        self, module: Any, maximum: Callable[[list[float]], list[float]]
    ) -> SequenceLengths | None:
        """Return the lengths of whole sequences, None if unknown; a collective call."""
        extremes = [-math.inf, 0.0, 0.0]
        if self._lengths:
            extremes = [-min(self._lengths), max(self._lengths), float(longest_of(module))]
        shortest, longest, max_length = maximum(extremes)
        if not longest:
            return None
        least, greatest = (round(length) * self._parts for length in (-shortest, longest))
        return SequenceLengths(least, greatest, round(max_length) or None)

    def _find_carriers(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        fitting = {place: self._sample_dims(place, shape) for place, shape in shapes.items()}
        self.dimensions = {p: dims[0] for p, dims in fitting.items() if len(dims) == 1}
        # If the user's micro batch is twice the trial's, that many rows may also be pairs (a chosen
        # and a rejected answer), unless the profile trial found a tensor's sample dimension.
        is_known = self._known_dims.keys() & shapes.keys()
        self._may_be_pairs = self._own_micro_batch == 2 * self._micro_batch and not is_known
        for dimension in range(2):
            carriers = {p: dimension for p, dims in fitting.items() if dimension in dims}
            if carriers:  # in a batch of texts and images, count texts
                texts = {p: d for p, d in carriers.items() if _name(p) == "input_ids"}
                return texts or carriers
        return {}

    def _count_rows(self, shapes: Mapping[str, Shape], carriers: Mapping[str, int]) -> int | None:
        """Return the number of samples in a call; None if unknown.

        `carriers` are tensors with their sample dimensions. Without them, all tensors with more
        than one row must have the same number of rows.
        """
        if carriers:
            sizes = [_size(shapes[p], d) for p, d in carriers.items() if p in shapes]
            return max((size for size in sizes if size is not None), default=None)
        rows = {_size(shape, self._known_dims.get(p, 0)) for p, shape in shapes.items()} - {None}
        rows = rows - {1} or rows
        return rows.pop() if len(rows) == 1 else None

    def _varies(self) -> bool:
        """Return whether the calls have different numbers of samples.

        The last batch of each epoch may be smaller: then at least half of the calls have the micro
        batch. If no tensor has it as a dimension, the smaller batches must recur regularly.
        """
        rows = self._rows
        if self._carriers or not rows:
            counts = [count for count in rows if count is not None]
            return 2 * counts.count(self._micro_batch) < len(counts)
        return not self._recurs() or any((count or 0) > (rows[0] or 0) for count in rows)

    def _recurs(self) -> bool:
        """Return whether only the last batch of each epoch has another number of samples."""
        rows, mode = self._rows, statistics.mode(self._rows)
        ends = [i for i, count in enumerate(rows) if count != mode]
        distances = {after - before for before, after in itertools.pairwise(ends)}
        return len(distances) <= 1 and len({rows[i] for i in ends}) <= 1

    def _drops(self) -> bool:
        """Return whether calls other than the last of an epoch lack samples.

        Batches filled by tokens do not count: some are larger, or the average is far smaller.
        """
        micro_batch, rows = self._micro_batch, [count for count in self._rows if count is not None]
        if not rows or len(rows) < len(self._rows) or max(rows) > micro_batch:
            return False
        epoch_samples, all_samples = loaders.samples(micro_batch, len(rows))
        num_short = sum(count < micro_batch for count in rows)
        at_ends = num_short <= all_samples // epoch_samples if epoch_samples else self._recurs()
        return not at_ends and sum(rows) > _FEWEST_KEPT * micro_batch * len(rows)

    def _refusal(self, rows: int) -> InvalidTrial:
        """Record a fixed batch size of the script; return the error that ends the trial."""
        self.fixed_batch = rows
        flag = find_batch_flag(sys.argv[1:], rows, TRIAL.script_options)
        advice = _ADVICE_WITH_FLAG.format(flag=flag) if flag else _ADVICE
        return InvalidTrial(
            IGNORES_BATCH.format(
                samples=fmt.count(rows, "sample"), micro_batch=self._micro_batch, advice=advice
            ),
            most_samples=rows if rows < self._micro_batch else None,
            fixed_batch=rows,
            batch_flag=flag,
        )

    def _sample_dims(self, place: str, shape: Shape) -> list[int]:
        """Return the dimensions of a tensor that may be the sample dimension."""
        candidates = (self._known_dims[place],) if place in self._known_dims else (0, 1)
        return [d for d in candidates if _size(shape, d) == self._micro_batch]

    def _tokens(self, leaves: Leaves) -> tuple[Any, int | None]:
        """Return the number of tokens and the longest sequence's length; None where unknown."""
        import torch

        id_leaves = {place: leaf for place, leaf in leaves.items() if _name(place) == "input_ids"}
        counts: list[Any] = []
        lengths = []
        for place, ids in (id_leaves or dict(list(leaves.items())[:1])).items():
            if not _is_of_ids(ids):
                continue
            masks = [
                p
                for p, leaf in leaves.items()
                if _name(p) == "attention_mask" and _shape(leaf) == _shape(ids)
            ]
            # The mask in the same container first: pairs of texts may have equal shapes.
            masks.sort(key=lambda p: p.rpartition(".")[0] != place.rpartition(".")[0])
            counts.append(torch.count_nonzero(leaves[masks[0]]) if masks else ids.numel())
            rows, length = ids.shape
            if length == self._micro_batch != rows:
                rows, length = length, rows
            if rows > 1 or rows == self._micro_batch:
                lengths.append(length)
        return sum(counts) if counts else None, max(lengths, default=None)


class LeafFinder:
    """Finder of the tensors in the arguments of a model.

    Large containers without tensors, such as lists of tokens, are searched only once.
    """

    def __init__(self) -> None:
        self._without_tensors: set[str] = set()  # places

    def find(self, values: Iterable[Any]) -> Leaves:
        """Return all tensors that are not scalars, by their places (`1.input_ids`).

        Containers, dataclasses and other objects are searched, four levels deep.

        Args:
            values: positional arguments, and named arguments as one mapping.
        """
        leaves: dict[str, torch.Tensor] = {}
        for place, value in enumerate(values):
            self._search(value, str(place), _DEPTH, leaves)
        return leaves

    def _search(self, value: Any, place: str, depth: int, leaves: dict[str, torch.Tensor]) -> int:
        """Add the tensors in a value to `leaves`; return the number of values visited."""
        if value is None or type(value) in (int, float, bool, str):
            return 1
        import torch

        if isinstance(value, torch.Tensor):
            if value.is_nested or value.dim():
                leaves[place] = value
            return 1
        if depth == 0 or isinstance(value, (str, bytes, type, torch.nn.Module)):
            return 1
        if place in self._without_tensors:
            return 1
        num_visited, num_before = 1, len(leaves)
        for name, part in _parts(value):
            num_visited += self._search(part, f"{place}.{name}", depth - 1, leaves)
        if num_visited >= _LARGE and len(leaves) == num_before:
            self._without_tensors.add(place)
        return num_visited


def _parts(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name, None)) for name in names]
    if type(value).__module__ != "builtins" and hasattr(value, "__dict__"):
        return list(vars(value).items())
    return ()


def _name(place: str) -> str:
    return place.rpartition(".")[2]


def _shape(leaf: torch.Tensor) -> Shape:
    """Return the shape of a tensor; for a nested tensor, only the number of sequences."""
    return (leaf.size(0),) if leaf.is_nested else tuple(leaf.shape)


def _size(shape: Shape, dimension: int) -> int | None:
    return shape[dimension] if dimension < len(shape) else None


def _is_of_ids(tensor: torch.Tensor) -> bool:
    import torch

    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    is_integer = is_integer and tensor.dtype is not torch.bool
    return is_integer and not tensor.is_nested and tensor.dim() == 2 and max(tensor.shape) > 1


def positions_of(config: Any) -> int:
    """Return the maximum number of positions in a transformers configuration; 0 if unknown."""
    size = getattr(config, "max_position_embeddings", getattr(config, "max_target_positions", 0))
    return size if isinstance(size, int) else 0


def longest_of(model: Any) -> int:
    """Return the maximum number of positions of a model, perhaps a wrapped one; 0 if unknown."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return next(filter(None, map(positions_of, configs)), 0)
