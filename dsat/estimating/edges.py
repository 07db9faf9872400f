"""Strategies that nearly fit: by how much they do not, and what activation checkpointing saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsat.estimating.line import Line
from dsat.memory.predictor import UNCALIBRATED_MARGIN
from dsat.values import format as fmt
from dsat.values.zero_strategy import Strategy

_NEAR = 0.1  # of a device's memory


@dataclass(frozen=True)
class Edge:
    """A strategy that nearly fits devices of a size.

    Attributes:
        memory_bytes: of a device.
        missing_bytes: of each device, with 5 % to spare.
        saved_bytes: by activation checkpointing; 0 if it is on, or cannot be turned on.
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
    """Return by how much something does not fit, and what would help."""
    text = f"does not fit by {fmt.memory(missing_bytes)}"
    if not saved_bytes:
        return text
    return f"{text}; activation checkpointing would save {fmt.memory(saved_bytes)}"


def missing(needed_bytes: int, memory_bytes: int) -> int:
    """Return the bytes that a device lacks, if 5 % are to be left free."""
    return round(needed_bytes * UNCALIBRATED_MARGIN) - memory_bytes


def nearly_fitting(lines: Sequence[Line]) -> list[Edge]:
    """Return the strategies that nearly fit, for each number of devices and size.

    It is the first one, in the usual order, before any that fits.
    """
    found: dict[tuple[int, int], Edge | None] = {}
    for line in lines:
        for size, most in line.largest.items():
            lacking = missing(line.needed, size)
            if most:
                found.setdefault((line.slots, size), None)
            elif 0 < lacking <= _NEAR * size:
                edge = Edge(line.slots, size, line.strategy, lacking)
                found.setdefault((line.slots, size), edge)
    return [edge for edge in found.values() if edge is not None]
