"""Expected numbers are bytes per parameter, worked out from what DeepSpeed 0.19.8 allocates.

For Adam in 16 bits: 2 for the parameter, 2 for its gradient, 4 for its fp32 copy, 4 + 4 for the
moments; in the step 4 for the fp32 gradient, and copies that differ from stage to stage.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsat.memory import describe, describe_floors, largest_micro_batch, model_state, required_bytes
from dsat.values.outcome import ModelProfile
from dsat.values.zero_strategy import Strategy, plain

P = 1_200_000
MODEL = ModelProfile(
    num_params=P,
    trainable_params=P,
    param_bytes=2,
    activation_bytes_per_sample=1000,
    flops_per_sample=2e9,
    slot_memory_bytes=100 * P,
)
FP32 = replace(MODEL, param_bytes=4)
# 1 % of the parameters are trained, as with LoRA.
LORA = replace(MODEL, trainable_params=P // 100)


@pytest.mark.parametrize(
    ("profile", "stage", "resident", "step_peak"),
    [
        (MODEL, 0, 14, 24),
        (MODEL, 1, 14, 22),
        (MODEL, 2, 14, 22),
        (MODEL, 3, 16, 22),
        # torch's Adam in the step: its two temporaries are among the 20.
        (FP32, 0, 12, 20),
        (FP32, 1, 16, 24),
        (FP32, 2, 16, 24),
        (FP32, 3, 20, 24),
    ],
)
def test_bytes_per_parameter_on_one_slot(
    profile: ModelProfile, stage: int, resident: int, step_peak: int
) -> None:
    state = model_state(profile, Strategy(stage), 1)
    assert state.resident == resident * P
    assert state.resident + state.step == step_peak * P
    assert required_bytes(profile, Strategy(stage), 1, 1) == step_peak * P


@pytest.mark.parametrize(
    ("profile", "stage", "resident", "backward", "step"),
    [
        # 4 slots; stage 0 shards nothing.
        (MODEL, 0, 14, 4, 10),
        (MODEL, 1, 2 + 12 / 4, 2, 8 / 4),
        (MODEL, 2, 2 + 12 / 4, 2 / 4, 8 / 4),
        (MODEL, 3, 16 / 4, 0, 6 / 4),
        (FP32, 0, 12, 4, 8),
        (FP32, 1, 4 + 12 / 4, 4, 8 / 4),
        (FP32, 2, 4 + 12 / 4, 4 / 4, 8 / 4),
        (FP32, 3, 20 / 4, 0, 4 / 4),
        # Frozen parameters have neither gradients nor optimizer state.
        (LORA, 0, 2 + 0.12, 0.04, 0.10),
        (LORA, 1, 2 + 0.12 / 4, 0.02, 0.08 / 4),
        (LORA, 2, 2 + 0.12 / 4, 0.02 / 4, 0.08 / 4),
        (LORA, 3, (2 + 0.14) / 4, 0, 0.06 / 4),
    ],
)
def test_bytes_per_parameter_on_four_slots(
    profile: ModelProfile, stage: int, resident: float, backward: float, step: float
) -> None:
    state = model_state(profile, Strategy(stage), 4)
    assert state.resident == pytest.approx(resident * P)
    assert state.backward == pytest.approx(backward * P)
    assert state.step == pytest.approx(step * P)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_are_rounded_up(stage: int) -> None:
    tiny = replace(MODEL, num_params=10, trainable_params=10)
    shard = 4  # 10 parameters on 3 slots
    whole = shard if stage == 3 else 10
    gradients = 2 * shard if stage == 3 else 0
    assert model_state(tiny, Strategy(stage), 3).resident == 2 * whole + 12 * shard + gradients


@pytest.mark.parametrize("profile", [MODEL, FP32, LORA])
@pytest.mark.parametrize("slots", [2, 8])
def test_each_stage_needs_no_more_than_the_one_before(profile: ModelProfile, slots: int) -> None:
    needed = [required_bytes(profile, Strategy(stage), slots, 64) for stage in range(4)]
    assert needed == sorted(needed, reverse=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_peak_is_the_backward_pass_or_the_step(stage: int) -> None:
    state = model_state(MODEL, Strategy(stage), 1)
    few, many = 1, 10**6
    assert required_bytes(MODEL, Strategy(stage), 1, few) == state.resident + state.step
    assert (
        required_bytes(MODEL, Strategy(stage), 1, many)
        == state.resident + state.backward + 1000 * many
    )


@pytest.mark.parametrize("profile", [MODEL, FP32, LORA])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("slots", [1, 4])
def test_the_largest_micro_batch_fits_and_the_next_one_does_not(
    profile: ModelProfile, stage: int, slots: int
) -> None:
    largest = largest_micro_batch(profile, Strategy(stage), slots)
    assert required_bytes(profile, Strategy(stage), slots, largest) <= profile.slot_memory_bytes
    assert required_bytes(profile, Strategy(stage), slots, largest + 1) > profile.slot_memory_bytes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_largest_micro_batch_is_one_when_not_even_the_model_fits(stage: int) -> None:
    small = replace(MODEL, slot_memory_bytes=3 * P)
    assert largest_micro_batch(small, Strategy(stage), 1) == 1


def test_a_model_without_activations_has_a_largest_micro_batch() -> None:
    assert largest_micro_batch(replace(MODEL, activation_bytes_per_sample=0), Strategy(1), 1) >= 1


def test_the_description_gives_every_stage_in_gib() -> None:
    gib = 2**30
    model = replace(
        MODEL,
        num_params=gib,
        trainable_params=gib,
        activation_bytes_per_sample=gib,
        slot_memory_bytes=80 * gib,
    )
    head, memory = describe(model)
    first, third = describe_floors(model, plain(1, 3), 1)
    assert head.startswith(f"parameters {gib:,} (trainable {gib:,}), 2 bytes")
    assert "80.0 GiB" in memory and "1024.00 MiB per sample" in memory and "2.000 GFLOP" in memory
    assert first == (
        "stage 1: about 22.00 GiB per slot at micro batch 1, approximate largest micro batch 64"
    )
    assert third == (
        "stage 3: about 22.00 GiB per slot at micro batch 1, approximate largest micro batch 64"
    )
