"""The user's configuration, changed to other strategies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dsat.memory.strategies import apply_strategy, compared
from dsat.values.zero_strategy import Strategy

BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("base", "slots", "gas"),
    [
        ({}, 8, 1),
        ({"gradient_accumulation_steps": 4}, 8, 4),
        ({"gradient_accumulation_steps": "auto"}, 8, 1),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 8, 4),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 1, 32),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 128}, 1, 1),
        ({"train_batch_size": 64}, 1, 1),
    ],
)
def test_gradients_are_accumulated_as_the_user_does(
    base: Mapping[str, Any], slots: int, gas: int
) -> None:
    found = apply_strategy(base, Strategy(1), slots)
    assert found["gradient_accumulation_steps"] == gas
    assert not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(found)


def test_slots_share_samples_as_the_users_do_where_they_can() -> None:
    own = {"sequence_parallel_size": 4, "train_micro_batch_size_per_gpu": 1}
    sizes = [apply_strategy(own, Strategy(3), n)["sequence_parallel_size"] for n in (1, 8)]
    assert sizes == [1, 4]
    batch = {**own, "train_batch_size": 8}
    gas = [apply_strategy(batch, Strategy(3), n)["gradient_accumulation_steps"] for n in (1, 8)]
    assert gas == [8, 4]


@pytest.mark.parametrize(
    ("config", "stage"),
    [
        ({}, 0),
        ({**BF16, "data_types": {"grad_accum_dtype": None}}, 0),
        ({**BF16, "data_types": {"grad_accum_dtype": "bfloat16"}}, 0),
        ({**BF16, "data_types": {"grad_accum_dtype": "fp32"}}, 1),
        ({"bf16": {"enabled": "auto"}, "data_types": {"grad_accum_dtype": "fp32"}}, 0),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, 1),
    ],
)
def test_stages_that_deepspeed_refuses_are_not_shown(config: Mapping[str, Any], stage: int) -> None:
    assert compared(config)[0] == Strategy(stage)
