"""Metrics and objectives of a search. Each metric is declared here, once."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A metric that a search can optimise; its value is the field of the same name in `Metrics`.

    Attributes:
        unit: printed after a value.
        has_interval: whether the latency's relative confidence interval applies to it.
        of_time: whether it is a time or a rate, so that the `model` search can predict it.
        has_prefix: whether large values get a prefix, as in `1.2 TFLOP/s`.
        autotuner_names: other names in DeepSpeed's `autotuning` section.
    """

    unit: str
    larger_is_better: bool = False
    has_interval: bool = False
    of_time: bool = True
    has_prefix: bool = False
    autotuner_names: tuple[str, ...] = ()


METRICS: Mapping[str, Metric] = {
    "FLOPS_per_gpu": Metric(
        "FLOP/s per device",
        larger_is_better=True,
        has_interval=True,
        has_prefix=True,
        autotuner_names=("FLOPS", "flops"),
    ),
    "throughput": Metric("samples/s", larger_is_better=True, has_interval=True),
    "tokens_per_second": Metric("tokens/s", larger_is_better=True, has_interval=True),
    "forward": Metric("ms", autotuner_names=("fwd",)),
    "backward": Metric("ms", autotuner_names=("bwd",)),
    "step": Metric("ms"),
    "latency": Metric("ms", has_interval=True),
}
METRIC_NAMES = tuple(METRICS)


@dataclass(frozen=True)
class Objective:
    """The metric to optimise and its direction."""

    metric: str

    def __post_init__(self) -> None:
        if self.metric not in METRIC_NAMES:
            raise ValueError(f"metric {self.metric!r} is not one of {', '.join(METRIC_NAMES)}")

    @property
    def smaller_is_better(self) -> bool:
        return not METRICS[self.metric].larger_is_better

    def is_better(self, value: float, other: float | None) -> bool:
        """Return whether `value` is better than `other`; any value is better than None."""
        if other is None:
            return True
        return value < other if self.smaller_is_better else value > other

    def loss(self, value: float) -> float:
        """Return the value, negated if larger is better, so that smaller is better."""
        return value if self.smaller_is_better else -value

    def log_value(self, value: float) -> float:
        """Return the logarithm of a value, negated if smaller is better.

        Zero, the time of a phase that the script lacks, counts as the smallest positive number.
        """
        log_value = math.log(max(value, sys.float_info.min))
        return -log_value if self.smaller_is_better else log_value

    def value_of(self, log_value: float) -> float:
        """Return the value that has a given `log_value`."""
        return math.exp(-log_value if self.smaller_is_better else log_value)

    def gain(self, value: float, reference: float) -> float:
        """Return how many times better `value` is than `reference`; inf if the divisor is 0."""
        better, worse = (reference, value) if self.smaller_is_better else (value, reference)
        return better / worse if worse else float("inf")
