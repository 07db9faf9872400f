"""The fewest GPUs that hold a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dsat.estimating import fewest_gpus
from dsat.memory import closed_form
from dsat.memory.facts import ModelFacts
from dsat.memory.predictor import Basis, Variant
from dsat.memory.strategies import apply_strategy
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
SEVENTY_BILLION = replace(SEVEN_BILLION, num_params=7 * 10**10, trainable_params=7 * 10**10)


def chosen(facts: ModelFacts, **settings: Any) -> list[fewest_gpus.Choice]:
    base = {**BF16, **settings}
    return fewest_gpus.fewest(Basis((Variant({}, facts),)), base)


def peak(choice: fewest_gpus.Choice, **changes: Any) -> int:
    """Return the memory of a GPU by the closed form, with changes to a choice."""
    wanted = replace(choice, **changes)
    config = apply_strategy(BF16, wanted.strategy, wanted.gpus)
    needed = closed_form.estimate(
        SEVEN_BILLION, config, slots=wanted.gpus, micro_batch=wanted.micro_batch
    )
    return needed.peak


def test_one_gpu_less_is_not_enough() -> None:
    for choice in chosen(SEVEN_BILLION):
        if choice.strategy.offloads:
            continue
        limit = choice.memory_bytes / 1.05
        assert peak(choice) <= limit < peak(choice, micro_batch=choice.micro_batch + 1)
        less = choice.gpus - (8 if choice.gpus > 8 else 1)
        for stage in range(4 if less else 0):
            assert peak(choice, gpus=less, strategy=Strategy(stage), micro_batch=1) > limit
    counts = {choice.gpus for choice in chosen(SEVENTY_BILLION) if not choice.strategy.offloads}
    assert all(count < 8 or count % 8 == 0 for count in counts)
    assert any(count.bit_count() > 1 for count in counts)  # not only powers of two


def test_offloading_is_shown_where_it_saves_gpus() -> None:
    found = chosen(SEVEN_BILLION)
    counts = {choice.memory_bytes: choice.gpus for choice in found if not choice.strategy.offloads}
    assert list(counts.values()) == sorted(counts.values(), reverse=True)
    offloaded = [choice for choice in found if choice.strategy.offloads]
    assert offloaded and all(each.gpus < counts[each.memory_bytes] for each in offloaded)
    assert len(fewest_gpus.table(found)) == len(found) + 2


@pytest.mark.parametrize("group", [4, 16])
@pytest.mark.parametrize("key", ["sequence_parallel_size", "tensor_parallel"])
def test_gpus_are_whole_groups_of_the_users_parallelism(key: str, group: int) -> None:
    """A sample of 320 GiB fits only if a group of GPUs shares it."""
    facts = replace(SEVEN_BILLION, backward_bytes_per_sample=320.0 * GIB)
    size = {"autotp_size": group} if key == "tensor_parallel" else group
    found = chosen(facts, **{key: size})
    assert found and all(choice.gpus % group == 0 for choice in found)
    assert min(choice.gpus for choice in found) == group


def test_gpus_share_the_users_batch_evenly() -> None:
    found = chosen(SEVENTY_BILLION, train_batch_size=64)
    assert found and all(64 % choice.gpus == 0 for choice in found)


def test_a_model_that_fits_nowhere() -> None:
    found = chosen(ModelFacts(10**9, 10**9, 10**8, 1e15, 1e15, 1e15))
    assert found == [] and "1024 GPUs" in fewest_gpus.table(found)[0]


def test_the_host_holds_the_weights_that_its_ranks_load() -> None:
    """Each rank without `zero.Init` loads 13 GiB: eight do not fit in 60 GiB, four do."""
    facts = replace(SEVEN_BILLION, uses_zero_init=False)
    basis = Basis((Variant({}, facts),))
    limit = 60 * GIB
    found = fewest_gpus.fewest(basis, BF16, limit)
    assert found and all(1.05 * choice.host_bytes <= limit for choice in found)
    for choice in found:
        loaded = min(choice.gpus, 8) * 2 * facts.num_params
        assert choice.host_bytes >= loaded
