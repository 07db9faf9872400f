"""The strategy that an estimate advises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dsat.estimating.advice import Advice, advise
from dsat.estimating.line import Line
from dsat.memory.estimate import MemoryEstimate
from dsat.memory.facts import ModelFacts
from dsat.values.zero_strategy import CPU, Strategy

GIB = 2**30
BF16: Mapping[str, Any] = {"bf16": {"enabled": True}}
STAGE_1, STAGE_2, STAGE_3 = Strategy(1), Strategy(2), Strategy(3)
OFFLOADED = Strategy(2, CPU)
THIRTY_BILLION = ModelFacts(
    num_params=3 * 10**10,
    trainable_params=3 * 10**10,
    largest_param=10**9,
    forward_bytes_per_sample=2.0 * GIB,
    backward_bytes_per_sample=2.0 * GIB,
    first_gradient_bytes_per_sample=1.0 * GIB,
)


def advice(
    slots: int,
    size: int,
    largest: Mapping[Strategy, int],
    *,
    facts: ModelFacts = THIRTY_BILLION,
    length: int | None = 2048,
) -> list[Advice]:
    nothing = MemoryEstimate(0, 0, 0, 0)
    lines = [
        Line(strategy, slots, nothing, GIB, 0, 0, {size: most}, {})
        for strategy, most in largest.items()
    ]
    return advise(facts, BF16, lines, length)


def test_offloading_is_not_advised_where_stage_3_fits_gpus_with_fast_links() -> None:
    [found] = advice(32, 80 * GIB, {STAGE_2: 0, OFFLOADED: 2, STAGE_3: 16})
    assert (found.gpu, found.strategy, found.other) == ("H100", STAGE_3, OFFLOADED)
    assert found.speedup > 1.5 and "as fast as stage 2, optimizer on cpu" in str(found)


def test_of_strategies_that_are_about_as_fast_the_usual_first_is_advised() -> None:
    small = replace(THIRTY_BILLION, num_params=10**9, trainable_params=10**9)
    [found] = advice(8, 80 * GIB, {STAGE_1: 16, STAGE_2: 16, STAGE_3: 16}, facts=small)
    assert found.strategy == STAGE_1
    assert found.other is None or found.speedup < 1.1


def test_without_a_known_speed_the_usual_order_decides() -> None:
    largest = {STAGE_2: 0, OFFLOADED: 2, STAGE_3: 16}
    [unknown_gpu] = advice(32, 60 * GIB, largest)
    [no_tokens] = advice(32, 80 * GIB, largest, length=None)
    for found in (unknown_gpu, no_tokens):
        assert (found.gpu, found.strategy, found.other) == ("", OFFLOADED, None)
        assert "speeds are unknown" in str(found)
    assert advice(1, 80 * GIB, {STAGE_2: 0, STAGE_3: 0}) == [], "where nothing fits"
