"""Strategies that nearly fit, or would with activation checkpointing."""

from __future__ import annotations

from dsat.estimating.edges import nearly_fitting
from dsat.estimating.line import Line
from dsat.memory.estimate import MemoryEstimate
from dsat.values.zero_strategy import CPU, Strategy

GIB = 2**30
GPU = 24 * GIB


def line(strategy: Strategy, needed_gib: int) -> Line:
    needed = needed_gib * GIB
    most = {GPU: int(1.05 * needed <= GPU)}
    return Line(strategy, 1, MemoryEstimate(0, 0, needed, 0, 0, 0), needed, 0, 0, most, {})


def test_a_strategy_that_fits_with_checkpointing_is_named_beside_offloading() -> None:
    lines = [
        line(Strategy(0), 50),
        line(Strategy(1), 32),
        line(Strategy(2, offload_optimizer=CPU), 20),
        line(Strategy(3), 32),
    ]
    assert not nearly_fitting(lines)
    [edge] = nearly_fitting(lines, lambda line: 12 * GIB)
    assert edge.strategy == Strategy(1) and "would save 12.00 GiB" in str(edge)
    assert not nearly_fitting(lines, lambda line: 6 * GIB)
