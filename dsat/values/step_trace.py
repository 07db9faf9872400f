"""Trace of an optimizer step: the kernels and collectives that a simulation counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsat.values.codec import Recorded

FORWARD, BACKWARD, STEP = PHASES = ("forward", "backward", "step")
MATMUL, ATTENTION, CONVOLUTION = COMPUTE_KINDS = ("matmul", "attention", "convolution")
MEMORY, HOST, TRANSFER = "memory", "host", "transfer"
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"


@dataclass(frozen=True)
class Kernels:
    """Calls of operators of one kind and size.

    Attributes:
        phase: one of `PHASES`.
        last: True for the last micro step of an optimizer step, False for any earlier one.
        kind: one of `COMPUTE_KINDS`; `memory` for other operators; `host` for operators on host
            tensors; `transfer` for copies between host and device.
        itemsize: bytes of an element of the result.
        flops, bytes: mean per call: FLOPs executed, and bytes of all inputs and outputs.
    """

    phase: str
    last: bool
    kind: str
    itemsize: int
    flops: float
    bytes: float
    count: int


@dataclass(frozen=True)
class Collectives:
    """Collectives of one kind among the same ranks.

    Attributes:
        phase, last: as for `Kernels`.
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, or torch's name of another collective.
        stride: distance between neighbouring ranks of the group.
        overlapped: whether it runs on a separate stream, concurrently with the kernels.
        bytes: size of the whole gathered or reduced tensors, summed over all calls.
    """

    phase: str
    last: bool
    kind: str
    ranks: int
    stride: int
    overlapped: bool
    bytes: float
    count: int


@dataclass(frozen=True)
class StepTrace(Recorded):
    """One optimizer step of one rank.

    Attributes:
        parameters: number of trainable parameter tensors; DeepSpeed hooks each of them.
        model_flops: FLOPs of a micro step, forward and backward, without recomputation.
    """

    kernels: tuple[Kernels, ...]
    collectives: tuple[Collectives, ...]
    micro_batch: int
    slots: int
    parameters: int
    model_flops: float

    def bytes_of(self, kind: str, phases: Sequence[str], *, last: bool = True) -> float:
        """Return the bytes that kernels of one kind move in the given phases of a micro step.

        `last` selects the last micro step of the optimizer step; otherwise, an earlier one.
        """
        return sum(
            k.bytes * k.count
            for k in self.kernels
            if k.kind == kind and k.phase in phases and k.last == last
        )

    def launches(self, phases: Sequence[str]) -> int:
        """Return the number of device kernels in the given phases of the last micro step."""
        return sum(k.count for k in self.kernels if k.last and k.phase in phases and k.kind != HOST)


@dataclass(frozen=True)
class ModelTrace:
    """Forward and backward pass of a model without DeepSpeed, traced at two micro batches.

    A kernel's FLOPs and bytes are linear in the micro batch, so two traces determine all others.
    """

    small: StepTrace
    large: StepTrace

    @property
    def model_flops_per_sample(self) -> float:
        return self.small.model_flops / self.small.micro_batch

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the number format that has the most FLOPs."""
        flops: defaultdict[int, float] = defaultdict(float)
        for k in self.small.kernels:
            flops[k.itemsize] += k.count * k.flops
        return max(flops, key=flops.__getitem__)

    def at(self, micro_batch: float) -> list[Kernels]:
        """Return the kernels at a micro batch, by linear interpolation between the two traces.

        If the traces consist of different kernels, the kernels of `small` are scaled.
        """
        small, large = self.small, self.large
        pairs = list(zip(small.kernels, large.kernels, strict=False))
        if [_shape(one) for one, _ in pairs] != [_shape(other) for _, other in pairs]:
            ratio = micro_batch / small.micro_batch
            return [replace(k, flops=ratio * k.flops, bytes=ratio * k.bytes) for k in small.kernels]
        part = (micro_batch - small.micro_batch) / (large.micro_batch - small.micro_batch)
        return [
            replace(
                one,
                flops=max(0.0, one.flops + part * (other.flops - one.flops)),
                bytes=max(0.0, one.bytes + part * (other.bytes - one.bytes)),
            )
            for one, other in pairs
        ]


def _shape(kernels: Kernels) -> tuple[str, str, int, int]:
    return kernels.phase, kernels.kind, kernels.itemsize, kernels.count
