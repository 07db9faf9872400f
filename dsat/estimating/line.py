"""One line of the table of `dsat estimate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsat.memory.estimate import MemoryEstimate
from dsat.values.zero_strategy import Strategy


@dataclass(frozen=True, eq=False)
class Line:
    """Memory of one strategy on a number of devices.

    Attributes:
        slots: number of devices.
        estimate: memory with a micro batch of one sample.
        needed: bytes that a device needs for that micro batch.
        host: bytes that the ranks of a host need: to load the weights, or to train.
        saved: part of `host` that `"pin_memory": false` saves.
        largest: by memory of a device, the largest micro batch; 0 if none fits device and host.
        longest: by memory of a device, tokens of the longest sequence at micro batch 1; empty if
            samples are not sequences, or if memory grows with the square of their length.
        fits_host: whether the host has enough memory for `host`; True if its memory is unknown.
    """

    strategy: Strategy
    slots: int
    estimate: MemoryEstimate
    needed: int
    host: int
    saved: int
    largest: Mapping[int, int]
    longest: Mapping[int, int]
    fits_host: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.name,
            "slots": self.slots,
            "memory": self.estimate.to_json(),
            "peak_bytes": self.needed,
            "host_bytes": self.host,
            "saved_without_pinning_bytes": self.saved,
            "largest_micro_batch": {str(size): count for size, count in self.largest.items()},
            "longest_sequence": {str(size): tokens for size, tokens in self.longest.items()},
        }
