"""A floor of the bytes that a strategy needs on one slot, for bounds that need no configuration.

Counted for Adam, from what deepspeed 0.19.8 allocates (runtime/zero/stage_1_and_2.py, stage3.py,
runtime/fp16/fused_optimizer.py): parameters, gradients, optimizer state and the temporary copies of
the optimizer step. Only trainable parameters carry gradients and optimizer state. Buckets are left
out, because a search chooses them: the result is a floor, and the micro batch derived from it an
upper end for a search rather than a promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsat.values.outcome import ModelProfile
from dsat.values.zero_strategy import NONE, Strategy


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one slot, without activations and buckets.

    Attributes:
        resident: held all the time: parameters, optimizer state, and the gradients of stage 3,
            which have one buffer from the beginning (`grad_partitions_flat_buffer`).
        backward: gradients, added while activations are alive.
        step: added in the optimizer step, when activations are gone.
    """

    resident: int
    backward: int
    step: int


def model_state(profile: ModelProfile, strategy: Strategy, slots: int) -> StateBytes:
    """Model state of one slot under a strategy with `slots` data-parallel slots."""
    params, trained, size = profile.num_params, profile.trainable_params, profile.param_bytes
    stage, shard = strategy.stage, -(-trained // slots)
    own_params = params if stage < 3 else -(-params // slots)
    if strategy.offload_param != NONE:
        own_params = 0
    grads = trained if stage == 1 else shard
    if strategy.offload_optimizer != NONE:
        # The optimizer's step and, in stage 3, the gradients are the host's.
        return StateBytes(size * own_params, size * grads if stage < 3 else 0, 0)
    if size == 4:
        if stage == 0:
            return StateBytes(4 * params + 8 * trained, 4 * trained, 8 * trained)
        if stage in (1, 2):
            return StateBytes(4 * params + 12 * shard, 4 * grads, 8 * shard)
        return StateBytes(4 * own_params + 16 * shard, 0, 4 * shard)
    if stage == 0:
        return StateBytes(size * params + 12 * trained, 2 * size * trained, 10 * trained)
    if stage in (1, 2):
        return StateBytes(size * params + 12 * shard, size * grads, (2 * size + 4) * shard)
    return StateBytes(size * own_params + (size + 12) * shard, 0, (size + 4) * shard)


def required_bytes(profile: ModelProfile, strategy: Strategy, slots: int, micro_batch: int) -> int:
    """Peak bytes of one slot: the larger of the backward pass and the optimizer step."""
    state = model_state(profile, strategy, slots)
    activations = profile.activation_bytes_per_sample * micro_batch
    return state.resident + max(state.backward + activations, state.step)


def largest_micro_batch(profile: ModelProfile, strategy: Strategy, slots: int) -> int:
    """The largest micro batch that the closed form lets fit; at least 1."""
    state = model_state(profile, strategy, slots)
    free = profile.slot_memory_bytes - state.resident - state.backward
    return max(1, free // max(1, profile.activation_bytes_per_sample))


def describe(profile: ModelProfile) -> list[str]:
    """The lines that tell a person what the profile found."""
    gib, mib = 2**30, 2**20
    return [
        f"parameters {profile.num_params:,} (trainable {profile.trainable_params:,}), "
        f"{profile.param_bytes} bytes each in the forward pass",
        f"memory per slot {profile.slot_memory_bytes / gib:.1f} GiB, "
        f"activations {profile.activation_bytes_per_sample / mib:.2f} MiB per sample, "
        f"{profile.flops_per_sample / 1e9:.3f} GFLOP per sample (forward and backward)",
    ]


def describe_floors(profile: ModelProfile, strategies: Sequence[Strategy], slots: int) -> list[str]:
    """The lines that tell a person what each strategy needs at least."""
    lines = []
    for strategy in strategies:
        needed = required_bytes(profile, strategy, slots, 1) / 2**30
        largest = largest_micro_batch(profile, strategy, slots)
        lines.append(
            f"{strategy.label}: about {needed:.2f} GiB per slot at micro batch 1, "
            f"approximate largest micro batch {largest}"
        )
    return lines
