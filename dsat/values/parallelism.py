"""Division of a trial's slots: data, tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Settings of DeepSpeed: AutoTP's, and the one that its Ulysses sequence parallelism goes by.
TENSOR_SIZE, SEQUENCE_SIZE = "tensor_parallel.autotp_size", "sequence_parallel_size"


@dataclass(frozen=True)
class Parallelism:
    """Slots that share a sample; slots = data parallel x tensor parallel x sequence parallel.

    Attributes:
        tensor: slots that share each layer (AutoTP), which see the same tokens.
        sequence: slots that share each sequence (Ulysses), which see different tokens.
    """

    tensor: int = 1
    sequence: int = 1

    @property
    def shared(self) -> int:
        """Slots that work on the same sample."""
        return self.tensor * self.sequence

    @property
    def activations_kept(self) -> float:
        """Part of a sample's activations that a slot has.

        Of the 34 bytes that a transformer's layer keeps for each element of its hidden state,
        tensor parallelism divides 24 (Korthikanti et al., Reducing Activation Recomputation in
        Large Transformer Models, 2022, equation 2).
        """
        return (10 + 24 / self.tensor) / 34 / self.sequence

    @property
    def settings(self) -> dict[str, int]:
        """The sizes as flat settings, by the names of their knobs."""
        return {TENSOR_SIZE: self.tensor, SEQUENCE_SIZE: self.sequence}

    @property
    def label(self) -> str:
        """For people: `tensor parallel 2, sequence parallel 4`; empty for data parallel alone."""
        sizes = (("tensor", self.tensor), ("sequence", self.sequence))
        return ", ".join(f"{name} parallel {size}" for name, size in sizes if size > 1)

    def groups(self, slots: int) -> str:
        """For people: `8 slots`, or `4 groups of 2 slots (tensor parallel 2)`."""
        if self.shared == 1:
            return f"{slots} devices"
        return f"{self.data(slots)} groups of {self.shared} devices ({self.label})"

    def data(self, slots: int) -> int:
        """Return the data-parallel size: groups of slots that have samples of their own."""
        return max(1, slots // self.shared)


DATA_ONLY = Parallelism()


def of_config(config: Mapping[str, Any]) -> Parallelism:
    """The parallelism of a DeepSpeed configuration."""
    section = config.get("tensor_parallel")
    tensor = section.get("autotp_size") if isinstance(section, Mapping) else None
    return Parallelism(_size(tensor), _size(config.get(SEQUENCE_SIZE)))


def of_settings(settings: Mapping[str, Any], own: Parallelism) -> Parallelism:
    """The parallelism of flat settings, as in a proposal; `own` where they have none."""
    return Parallelism(
        _size(settings.get(TENSOR_SIZE, own.tensor)),
        _size(settings.get(SEQUENCE_SIZE, own.sequence)),
    )


def _size(value: Any) -> int:
    """A size of the configuration; AutoTP's 0 is 1, and so is what DeepSpeed will refuse."""
    is_size = isinstance(value, int) and not isinstance(value, bool) and value > 1
    return int(value) if is_size else 1
