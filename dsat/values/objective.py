"""Objectives: the metrics by name, and their directions."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

LARGER_IS_BETTER = ("FLOPS_per_gpu", "throughput", "tokens_per_second")


SMALLER_IS_BETTER = ("forward", "backward", "step", "latency")


# Their relative intervals are that of the latency, the only one that is measured.
KNOWN_TO_CI95 = ("FLOPS_per_gpu", "throughput", "tokens_per_second", "latency")


METRIC_NAMES = (*LARGER_IS_BETTER, *SMALLER_IS_BETTER)


@dataclass(frozen=True)
class Objective:
    """The metric to optimise and its direction."""

    metric: str

    def __post_init__(self) -> None:
        if self.metric not in METRIC_NAMES:
            raise ValueError(f"metric {self.metric!r} is not one of {', '.join(METRIC_NAMES)}")

    @property
    def smaller_is_better(self) -> bool:
        return self.metric in SMALLER_IS_BETTER

    def is_better(self, value: float, other: float | None) -> bool:
        """Check if `value` beats `other`; anything beats None."""
        if other is None:
            return True
        return value < other if self.smaller_is_better else value > other

    def loss(self, value: float) -> float:
        """`value` turned so that smaller is better."""
        return value if self.smaller_is_better else -value

    def log_value(self, value: float) -> float:
        """The logarithm of a value, turned so that larger is better.

        A phase that the script does not have, or FLOPs that nobody counts, are 0.
        """
        log_value = math.log(max(value, sys.float_info.min))
        return -log_value if self.smaller_is_better else log_value

    def value_of(self, log_value: float) -> float:
        """Return the value of a logarithm; the inverse of `log_value`."""
        return math.exp(-log_value if self.smaller_is_better else log_value)

    def gain(self, value: float, reference: float) -> float:
        """Return the ratio of improvement of `value` over `reference` (1.0: equal)."""
        better, worse = (reference, value) if self.smaller_is_better else (value, reference)
        return better / worse if worse else float("inf")
