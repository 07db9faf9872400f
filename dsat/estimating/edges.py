"""Strategies that nearly fit, or would with activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.estimating.line import Line
from dsat.memory.predictor import UNCALIBRATED_MARGIN
from dsat.values import format as fmt
from dsat.values.zero_strategy import Strategy

_NEAR = 0.1  # of a device's memory


@dataclass(frozen=True)
class Edge:
    """A strategy that nearly fits devices of one size.

    Attributes:
        memory_bytes: memory of a device.
        missing_bytes: bytes that each device lacks, including a margin of 5 % of the need.
        saved_bytes: bytes that activation checkpointing would save; 0 if on, impossible or unknown.
    """

    slots: int
    memory_bytes: int
    strategy: Strategy
    missing_bytes: int
    saved_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "strategy": self.strategy.name}

    def __str__(self) -> str:
        return (
            f"{fmt.memory(self.memory_bytes)}: {self.strategy.label} "
            f"{describe(self.missing_bytes, self.saved_bytes)}"
        )


def describe(missing_bytes: int, saved_bytes: int) -> str:
    """Return a phrase with the missing memory and the saving by activation checkpointing."""
    text = f"lacks {fmt.memory(missing_bytes)} per GPU"
    if not saved_bytes:
        return text
    return f"{text}; activation checkpointing would save {fmt.memory(saved_bytes)}"


def missing(needed_bytes: int, memory_bytes: int) -> int:
    """Return the bytes that a device lacks, with a margin of 5 %; negative if memory suffices."""
    return round(needed_bytes * UNCALIBRATED_MARGIN) - memory_bytes


def nearly_fitting(
    lines: Sequence[Line], saved_bytes: Callable[[Line], int] = lambda line: 0
) -> list[Edge]:
    """Return the first strategy that nearly fits, for each number of devices and memory size.

    If a strategy before it fits, none is returned.

    Args:
        lines: in the usual order of strategies.
        saved_bytes: returns the bytes that activation checkpointing would save in a line.
    """
    edges: dict[tuple[int, int], Edge | None] = {}
    for line in lines:
        for size, most in line.largest.items():
            shortage = missing(line.needed, size)
            if most:
                edges.setdefault((line.slots, size), None)
            elif shortage > 0:
                saved = saved_bytes(line)
                if shortage <= max(_NEAR * size, saved * UNCALIBRATED_MARGIN):
                    edge = Edge(line.slots, size, line.strategy, shortage, saved)
                    edges.setdefault((line.slots, size), edge)
    return [edge for edge in edges.values() if edge is not None]
