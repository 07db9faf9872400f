"""Model and batch of the script, and a configuration to simulate them with."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsat.in_trial.simulation.module_snapshot import Initialize, ModuleSnapshot
from dsat.values import parallelism
from dsat.values.parallelism import Parallelism


@dataclass(frozen=True)
class Candidate:
    """Configuration to simulate, as `as_simulated` makes it.

    Attributes:
        slots: ranks.
        sequence_length: tokens of a sample; None for those that the script's has.
        as_cpu: the ranks run on a CPU.
        workspace_bytes: what cuBLAS takes on a device while it multiplies.
        traced: kernels and collectives are recorded.
    """

    config: Mapping[str, Any]
    micro_batch: int
    slots: int
    as_cpu: bool
    workspace_bytes: int
    traced: bool = False
    sequence_length: int | None = None

    @property
    def parallelism(self) -> Parallelism:
        """Division of layers and sequences among the ranks."""
        return parallelism.of_config(self.config)

    @property
    def gas(self) -> int:
        """Micro steps of an optimizer step."""
        return int(self.config.get("gradient_accumulation_steps", 1))


@dataclass(frozen=True)
class Captured:
    """Model and batch that the script gave to DeepSpeed.

    Attributes:
        initialize: DeepSpeed's own function.
        arguments: of `deepspeed.initialize`, by name.
        snapshot: the model as it was then.
        micro_batch: the samples in its first batch.
        dtype: of the parameters that the script saw when it made the batch.
        packed_length: of the one row that holds all samples; 0 if each has a row of its own.
        sequence_length: tokens of a sample, if samples are sequences of tokens.
        earlier: tensors that the script had before its engine.
        on_host: copies of integers that it has on another device, by the `id` of each.
        uses_zero_init: stage 3 partitions parameters while the script makes them.
    """

    initialize: Initialize
    arguments: Mapping[str, Any]
    snapshot: ModuleSnapshot
    micro_batch: int
    dtype: torch.dtype
    earlier: Container[torch.Tensor]
    packed_length: int = 0
    sequence_length: int | None = None
    on_host: Mapping[int, torch.Tensor] = field(default_factory=dict)
    uses_zero_init: bool = False

    def shape_for(self, candidate: Candidate, tensor: torch.Tensor) -> list[int]:
        """Return the shape of a tensor with a candidate's micro batch and part of a sequence.

        What the script had before its engine is of a batch only if it has just as many rows: a
        weight for each class has others.
        """
        wanted, shape = self._length_for(candidate), tensor.shape
        if self.packed_length:
            grown = wanted * candidate.micro_batch
            return [grown if size == self.packed_length else size for size in shape]
        samples, rest = divmod(shape[0], self.micro_batch)
        rest = rest or (samples != 1 and tensor in self.earlier)
        first = shape[0] if rest else samples * candidate.micro_batch
        # Of what has no samples, positions alone are tokens.
        is_of_tokens = not rest or shape[0] == 1 or len(shape) == 1
        sizes = [first, *shape[1:]]
        place = min(1, len(shape) - 1)
        if is_of_tokens and sizes[place] == self.sequence_length:
            sizes[place] = wanted
        return sizes

    def _length_for(self, candidate: Candidate) -> int:
        """Tokens of a sample that each rank of the candidate has."""
        own = self.packed_length // self.micro_batch or self.sequence_length or 0
        return -(-(candidate.sequence_length or own) // candidate.parallelism.sequence)


def repeated(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of the batch in another shape: its values over and over again."""
    for dim, (own, wanted) in enumerate(zip(tensor.shape, shape, strict=True)):
        if own != wanted:
            tensor = tensor.index_select(dim, torch.arange(wanted) % own)
    return tensor
