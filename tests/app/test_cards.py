"""The fewest cards that hold a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from dsat.app import cards, estimate
from dsat.memory import closed_form
from dsat.memory.closed_form import ModelFacts
from dsat.values.zero_strategy import Strategy

GIB = 2**30
BF16: Mapping[str, Any] = {"bf16": {"enabled": True}}
SEVEN_BILLION = ModelFacts(
    num_params=7 * 10**9,
    trainable_params=7 * 10**9,
    largest_param=10**8,
    forward_bytes_per_sample=2.0 * GIB,
    backward_bytes_per_sample=2.0 * GIB,
    first_gradient_bytes_per_sample=1.0 * GIB,
)


def advised(facts: ModelFacts) -> list[cards.Advice]:
    configuration = partial(estimate.configuration, BF16)
    return cards.advise(facts, configuration, estimate.LADDER, 1000)


def test_one_card_less_is_not_enough() -> None:
    for advice in advised(SEVEN_BILLION):
        choice = advice.plain
        assert choice is not None
        config = estimate.configuration(BF16, choice.strategy, choice.cards)
        needed = closed_form.estimate(
            SEVEN_BILLION, config, slots=choice.cards, micro_batch=choice.micro_batch
        )
        assert needed.peak * 1.05 <= advice.memory_bytes
        if choice.cards > 1:
            for stage in range(4):
                fewer = closed_form.estimate(
                    SEVEN_BILLION,
                    estimate.configuration(BF16, Strategy(stage), choice.cards // 2),
                    slots=choice.cards // 2,
                    micro_batch=1,
                )
                assert fewer.peak * 1.05 > advice.memory_bytes
        more = closed_form.estimate(
            SEVEN_BILLION, config, slots=choice.cards, micro_batch=choice.micro_batch + 1
        )
        assert more.peak * 1.05 > advice.memory_bytes
        assert choice.sequence_length is not None
        assert 1000 * choice.micro_batch <= choice.sequence_length
        assert choice.sequence_length < 1000 * (choice.micro_batch + 1)


def test_offloading_is_told_of_where_it_saves_cards() -> None:
    found = advised(SEVEN_BILLION)
    counts = [advice.plain.cards for advice in found if advice.plain is not None]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
    for advice in found:
        if advice.offloaded is not None:
            assert advice.plain is None or advice.offloaded.cards < advice.plain.cards
            assert advice.offloaded.host_bytes > 0
            assert "host memory" in str(advice)


def test_what_fits_nowhere_is_said_to() -> None:
    facts = ModelFacts(10**9, 10**9, 10**8, 1e15, 1e15, 1e15)
    for advice in advised(facts):
        assert advice.plain is advice.offloaded is None
        assert "not on 1024 cards" in str(advice)
