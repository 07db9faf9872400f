"""Bytes that a configuration needs, in closed form, at once.

The table behind it was read from deepspeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`,
`bf16_optimizer.py`, `fp16/fused_optimizer.py`, `engine.py`) and is held against the simulation by a
test. Letters as usual there: P parameters, T of them trained, n = T / ranks, S bytes of the model's
type, A of the type in which gradients are accumulated. For Adam; other optimizers with two moments
need the same, those with fewer need less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsat.memory.estimate import CLOSED_FORM, MemoryEstimate
from dsat.strategy import NONE, of_config
from dsat.trial import ModelProfile

_DEFAULT_BUCKET = 5 * 10**8  # zero/config.py: reduce_bucket_size
_DEFAULT_SUB_GROUP = 10**9
_DEFAULT_LIVE = 10**9
_ALL_REDUCE_BUCKET = 5 * 10**8  # engine.py: MEMORY_OPT_ALLREDUCE_SIZE
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """What the closed form must know of a model.

    Attributes:
        num_params, trainable_params: elements.
        largest_param: elements of the largest trained one.
        forward_bytes_per_sample: activations at their largest in the forward pass, the loss's own
            among them.
        backward_bytes_per_sample: at their largest in the backward pass, gradients of parameters
            not counted.
    """

    num_params: int
    trainable_params: int
    largest_param: int
    forward_bytes_per_sample: float
    backward_bytes_per_sample: float

    @classmethod
    def of_profile(cls, profile: ModelProfile) -> ModelFacts:
        """What a profile trial tells; of the backward pass it tells nothing of its own."""
        slope = profile.activation_bytes_per_sample
        return cls(
            num_params=profile.num_params,
            trainable_params=profile.trainable_params,
            largest_param=0,
            forward_bytes_per_sample=slope,
            backward_bytes_per_sample=slope,
        )


@dataclass(frozen=True)
class _Parts:
    """Bytes on the device without activations.

    Attributes:
        init: the peak of `deepspeed.initialize`.
        resident: held between steps.
        forward: added from the beginning of the forward pass.
        backward: added at the beginning of the backward pass, when activations are largest.
        gradients: added towards its end, when they are gone.
        step: added to what is resident in the optimizer step.
    """

    init: float
    resident: float
    forward: float
    backward: float
    gradients: float
    step: float


@dataclass(frozen=True)
class _Setup:
    facts: ModelFacts
    slots: int
    model_bytes: int
    accumulation_bytes: int
    gas: int
    bucket: int
    buckets: int
    sub_group: int
    live: int
    torch_adam: bool
    offload_optimizer: bool
    offload_param: bool

    @property
    def shard(self) -> float:
        return self.facts.trainable_params / self.slots


def estimate(
    facts: ModelFacts,
    config: Mapping[str, Any],
    *,
    slots: int,
    micro_batch: int,
    note: str = "",
) -> MemoryEstimate:
    """Memory of a configuration.

    Args:
        facts: of the model.
        config: the whole DeepSpeed configuration.
        slots: data-parallel ranks.
        micro_batch: samples per rank and micro step.
        note: why nothing better answers.
    """
    setup, stage = _setup(facts, config, slots), of_config(config).stage
    parts = (_stage_0, _stage_1_or_2, _stage_1_or_2, _stage_3)[stage](setup, stage)
    forward = facts.forward_bytes_per_sample * micro_batch
    backward = facts.backward_bytes_per_sample * micro_batch
    held = parts.resident + parts.forward
    pinned, pageable = _host(setup, stage)
    return MemoryEstimate(
        init=round(parts.init),
        forward=round(held + forward),
        backward=round(held + max(parts.backward + backward, parts.gradients)),
        step=round(parts.resident + parts.step),
        host_pinned=round(pinned),
        host_pageable=round(pageable),
        source=CLOSED_FORM,
        note=note,
    )


def _setup(facts: ModelFacts, config: Mapping[str, Any], slots: int) -> _Setup:
    zero = config.get("zero_optimization") or {}
    strategy = of_config(config)
    size = model_bytes(config)
    wanted = (config.get("data_types") or {}).get("grad_accum_dtype")
    optimizer = (config.get("optimizer") or {}).get("params") or {}
    overlap = zero.get("overlap_comm")
    return _Setup(
        facts=facts,
        slots=slots,
        model_bytes=size,
        accumulation_bytes=_BYTES.get(str(wanted), size),
        gas=int(config.get("gradient_accumulation_steps", 1)),
        bucket=int(zero.get("reduce_bucket_size", _DEFAULT_BUCKET)),
        buckets=2 if overlap else 1,
        sub_group=int(zero.get("sub_group_size", _DEFAULT_SUB_GROUP)),
        live=int(zero.get("stage3_max_live_parameters", _DEFAULT_LIVE)),
        torch_adam=bool(optimizer.get("torch_adam", False)),
        offload_optimizer=strategy.offload_optimizer != NONE,
        offload_param=strategy.offload_param != NONE,
    )


def model_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of a parameter in the forward pass."""
    for section in ("bf16", "bfloat16", "fp16"):
        if (config.get(section) or {}).get("enabled") in (True, "auto"):
            return 2
    return 4


def _stage_0(s: _Setup, stage: int) -> _Parts:
    total, trained = s.facts.num_params, s.facts.trainable_params
    flat = min(trained, _ALL_REDUCE_BUCKET)
    if s.model_bytes == 4:
        resident = 4 * total + 8 * trained
        temporary = 8 if s.torch_adam else 4
        return _Parts(4 * total, resident, 0, 0, 4 * trained + 4 * flat, temporary * trained)
    resident = 2 * total + 12 * trained
    init = 2 * total + (24 - 2 if s.torch_adam else 16) * trained
    return _Parts(init, resident, 0, 0, 2 * trained + 2 * flat, 10 * trained)


def _stage_1_or_2(s: _Setup, stage: int) -> _Parts:
    total, trained, size = s.facts.num_params, s.facts.trainable_params, s.model_bytes
    bucket = s.buckets * s.bucket * size
    if stage == 1 and s.accumulation_bytes > size:
        resident = size * total + 4 * trained + 12 * s.shard
        flat = size * total + size * trained
        init = max(flat, resident - 8 * s.shard)
        return _Parts(init, resident, 0, 0, size * trained, size * trained)
    own = min(trained, s.shard + 2 * s.facts.largest_param * (s.slots > 1))
    init = max(size * (total + trained), size * total + 8 * s.shard)
    if s.offload_optimizer:
        resident = size * total + size * s.facts.largest_param
        return _Parts(size * (total + trained), resident, 0, bucket, bucket + size * own, 0)
    resident = size * total + 12 * s.shard
    if s.accumulation_bytes > size:
        step = 4 * s.shard + 8 * min(s.facts.largest_param, s.shard)
        held = 4 * s.shard if s.gas > 1 else 0
        return _Parts(init, resident, held, bucket, bucket + 4 * s.shard, max(step, 4 * s.shard))
    held = size * s.shard if stage == 2 and s.gas > 1 else 0
    if stage == 1 and s.gas > 1:
        held = size * trained
    return _Parts(init, resident, held, bucket, bucket + size * own, (2 * size + 4) * s.shard)


def _stage_3(s: _Setup, stage: int) -> _Parts:
    total, trained, size = s.facts.num_params, s.facts.trainable_params, s.model_bytes
    bucket = s.bucket * size
    own = size * total / s.slots
    gathers = s.slots > 1 or s.offload_param
    live = size * min(total, s.live) if gathers else 0
    if s.offload_optimizer:
        resident = bucket + (0 if s.offload_param else own)
        return _Parts(resident, resident, live, 0, min(trained, s.bucket) * size, 0)
    group = min(s.shard, s.sub_group)
    resident = own + (s.accumulation_bytes + 12) * s.shard + bucket
    init = resident - 8 * s.shard
    step = (s.accumulation_bytes + 4) * group if size == 2 else 4 * group
    if s.torch_adam:
        step += 8 * group
    return _Parts(init, resident, live, 0, min(trained, s.bucket) * size, step)


def _host(s: _Setup, stage: int) -> tuple[float, float]:
    """Pinned and pageable bytes on the host."""
    if not s.offload_optimizer:
        return 0, 0
    size, total = s.model_bytes, s.facts.num_params
    if stage == 3:
        pinned = (4 + size) * s.shard + (2 * size * total / s.slots if s.offload_param else 0)
        return pinned, 12 * s.shard
    return (4 + 4 + size) * s.shard + size * s.facts.largest_param, 8 * s.shard
