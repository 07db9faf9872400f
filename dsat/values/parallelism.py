"""Parallelism of a trial's devices: data, tensor and sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# DeepSpeed's settings for AutoTP and for Ulysses sequence parallelism.
TENSOR_SIZE, SEQUENCE_SIZE = "tensor_parallel.autotp_size", "sequence_parallel_size"


@dataclass(frozen=True)
class Parallelism:
    """Tensor-parallel and sequence-parallel sizes.

    The number of devices is data parallel x tensor parallel x sequence parallel.

    Attributes:
        tensor: devices that share each layer (AutoTP) and process the same tokens.
        sequence: devices that share each sequence (Ulysses) and process different tokens.
    """

    tensor: int = 1
    sequence: int = 1

    @property
    def shared(self) -> int:
        """Number of devices that work on the same sample."""
        return self.tensor * self.sequence

    @property
    def activations_kept(self) -> float:
        """Fraction of a sample's activations that each device keeps.

        A transformer layer keeps 34 bytes per element of its hidden state, of which tensor
        parallelism divides 24 (Korthikanti et al., Reducing Activation Recomputation in
        Large Transformer Models, 2022, equation 2).
        """
        return (10 + 24 / self.tensor) / 34 / self.sequence

    @property
    def settings(self) -> dict[str, int]:
        """The sizes as flat settings of DeepSpeed, by name."""
        return {TENSOR_SIZE: self.tensor, SEQUENCE_SIZE: self.sequence}

    @property
    def label(self) -> str:
        """Description: `tensor parallel 2, sequence parallel 4`; empty for data parallel alone."""
        sizes = (("tensor", self.tensor), ("sequence", self.sequence))
        return ", ".join(f"{name} parallel {size}" for name, size in sizes if size > 1)

    def groups(self, slots: int) -> str:
        """Return a description: `8 devices` or `4 groups of 2 devices (tensor parallel 2)`."""
        if self.shared == 1:
            return "1 device" if slots == 1 else f"{slots} devices"
        return f"{self.data(slots)} groups of {self.shared} devices ({self.label})"

    def data(self, slots: int) -> int:
        """Return the data-parallel size: the number of groups of devices with different samples."""
        return max(1, slots // self.shared)


DATA_ONLY = Parallelism()


def read_parallelism(config: Mapping[str, Any]) -> Parallelism:
    """Return the parallelism of a DeepSpeed configuration."""
    section = config.get("tensor_parallel")
    tensor = section.get("autotp_size") if isinstance(section, Mapping) else None
    return Parallelism(_size(tensor), _size(config.get(SEQUENCE_SIZE)))


def apply_settings(settings: Mapping[str, Any], base: Parallelism) -> Parallelism:
    """Return the parallelism of flat settings, with the sizes of `base` where they lack one."""
    return Parallelism(
        _size(settings.get(TENSOR_SIZE, base.tensor)),
        _size(settings.get(SEQUENCE_SIZE, base.sequence)),
    )


def _size(value: Any) -> int:
    """Return a configured size; 1 for AutoTP's 0 and for values that DeepSpeed refuses."""
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and value > 1 else 1
