"""Memory of a configuration by formulas, without a simulation.

The formulas are derived from deepspeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`,
`bf16_optimizer.py`, `fp16/fused_optimizer.py`, `engine.py`); tests compare them with simulations.
They assume Adam. Other optimizers with two moments need the same; those with fewer need less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dsat.memory import host
from dsat.memory.estimate import PHASES, MemoryEstimate
from dsat.memory.facts import ModelFacts, Setup

# Workspaces that torch gives to cuBLAS on Hopper and later (`getChosenWorkspaceSize` of
# CublasHandlePool.cpp; 8 MiB on older GPUs), and to cuBLASLt, which computes products with a bias.
MATMUL_WORKSPACE_BYTES, BIASED_WORKSPACE_BYTES = 32 * 2**20, 2**20
_ALL_REDUCE_BUCKET = 5 * 10**8  # engine.py: MEMORY_OPT_ALLREDUCE_SIZE
_NORM_BUFFER = 25 * 10**7  # stage3.py: elements whose norm `_constant_buffered_norm2` takes at once


@dataclass(frozen=True)
class Line:
    """Bytes as a function of the micro batch.

    Attributes:
        fixed: bytes at any micro batch.
        per_sample: bytes for each sample.
        if_room: whether DeepSpeed allocates these bytes only if the device has room for them.
        per_pair: bytes for each pair of samples, as in a loss that compares samples.
    """

    fixed: float
    per_sample: float = 0.0
    if_room: bool = False
    per_pair: float = 0.0

    def at(self, micro_batch: float) -> float:
        return self.fixed + (self.per_sample + self.per_pair * micro_batch) * micro_batch

    def largest_within(self, room: float) -> float:
        """Return the largest micro batch, a real number, that needs at most `room` bytes.

        Return 0 if no micro batch fits, and infinity if all do.
        """
        free, slope, pairs = room - self.fixed, self.per_sample, self.per_pair
        if pairs > 0:
            root = slope**2 + 4 * pairs * free
            return max(0.0, (math.sqrt(root) - slope) / (2 * pairs)) if root > 0 else 0.0
        if slope > 0:
            return max(0.0, free / slope)
        return math.inf if free >= 0 else 0.0


def highest(phase: Iterable[Line], micro_batch: float) -> float:
    """Return the peak of a phase at a micro batch, in bytes."""
    return max(line.at(micro_batch) for line in phase)


@dataclass(frozen=True)
class _Parts:
    """Bytes on the device, without activations.

    Attributes:
        init: peak of `deepspeed.initialize` if it flattens parameters on the host.
        resident: bytes held between steps.
        forward: added to `resident` from the beginning of the forward pass.
        bucket: added with the first gradient, while most activations still exist.
        gradients: added towards the end of the backward pass, when activations are freed.
        reduction: added while a bucket is reduced, in the middle of the backward pass.
        step: added to `resident` in the optimizer step.
        gather: added to `forward` at the beginning of the pass, before there are activations.
        flat: peak of `deepspeed.initialize` if it flattens parameters on the device, as it does if
            a copy fits (`available_memory` in runtime/zero/stage_1_and_2.py); 0 if it never does.
    """

    init: float
    resident: float
    forward: float
    bucket: float
    gradients: float
    step: float
    reduction: float = 0
    gather: float = 0
    flat: float = 0


def estimate(
    facts: ModelFacts, config: Mapping[str, Any], *, slots: int, micro_batch: int
) -> MemoryEstimate:
    """Return the memory that a whole DeepSpeed configuration needs on one of `slots` slots."""
    phases = lines(facts, config, slots=slots)
    init, forward, backward, step = (round(highest(phases[name], micro_batch)) for name in PHASES)
    pinned, pageable = host.training(facts, config, slots=slots)
    return MemoryEstimate(init, forward, backward, step, round(pinned), round(pageable))


def lines(
    facts: ModelFacts, config: Mapping[str, Any], *, slots: int
) -> dict[str, tuple[Line, ...]]:
    """Return the lines of each phase on the device; `highest` gives the peak at a micro batch."""
    setup = Setup.of(facts, config, slots)
    facts = setup.facts
    parts = (_stage_0, _stage_1_or_2, _stage_1_or_2, _stage_3)[setup.strategy.stage](setup)
    base = parts.resident + parts.forward
    flat = (Line(parts.flat, if_room=True),) if parts.flat else ()
    # Activations that exist while a bucket is reduced are about those during a matrix product.
    activations = facts.matmul_bytes_per_sample or facts.first_gradient_bytes_per_sample
    is_whole = setup.strategy.stage == 3 and not facts.uses_zero_init
    whole = setup.model_bytes * facts.num_params if is_whole else 0
    return {
        "init": (Line(max(parts.init, whole)), *flat),
        "forward": (
            Line(base, facts.forward_bytes_per_sample),
            Line(base + parts.gather + facts.workspace_bytes),
        ),
        "backward": (
            Line(base, facts.backward_bytes_per_sample),
            Line(base + facts.matmul_bytes, facts.matmul_bytes_per_sample),
            Line(
                base + parts.bucket + facts.workspace_bytes, facts.first_gradient_bytes_per_sample
            ),
            Line(base + parts.gradients),
            Line(base + parts.reduction, activations if parts.reduction else 0.0),
        ),
        "step": (Line(parts.resident + parts.step, facts.held_bytes_per_sample),),
    }


def _stage_0(s: Setup) -> _Parts:
    total, trained, size = s.facts.num_params, s.facts.trainable_params, s.model_bytes
    flat = min(trained, _ALL_REDUCE_BUCKET)
    accumulated = size * trained if s.gas > 1 else 0
    gradients = size * (trained + flat) - accumulated
    if s.model_type == "fp32":  # the model keeps its type; gradients are reduced in fp32
        resident, cast = size * (total + 2 * trained), 4 * flat if size < 4 else 0
        temporary = (2 if s.torch_adam else 1) * size * trained
        return _Parts(size * total, resident, accumulated, 0, gradients + cast, temporary)
    resident = 2 * total + 12 * trained
    init = 2 * total + (24 - 2 if s.torch_adam else 16) * trained
    return _Parts(init, resident, accumulated, 0, gradients, 10 * trained)


def _stage_1_or_2(s: Setup) -> _Parts:
    total, trained, size = s.facts.num_params, s.facts.trainable_params, s.model_bytes
    bucket, largest = s.buckets * s.bucket * size, s.facts.largest_param
    stage = s.strategy.stage
    in_fp32 = s.accumulation_bytes > size
    if stage == 1 and in_fp32 and s.model_type == "bf16" and not s.offload_optimizer:
        # BF16_Optimizer keeps the gradients of a micro step until the next one's are allocated.
        resident = size * total + 4 * trained + 12 * s.shard
        init = max(size * (total + trained), resident - 8 * s.shard)
        accumulated = size * trained if s.gas > 1 else 0.0
        return _Parts(
            init, resident, accumulated, 0, 2 * size * trained - accumulated, size * trained
        )
    # Whole gradients of the parameters that overlap the rank's partition. Gradients of tied
    # parameters exist twice, and a gradient that exceeds the bucket is reduced by itself.
    overlap = min(trained, max(s.shard, largest) + 3 * largest if s.slots > 1 else trained)
    copies = (2 * largest if stage == 1 else 0) + (2 * largest if largest > s.bucket else 0)
    gradients = bucket + size * (overlap + copies)
    if stage == 1 and s.buckets == 1:
        # Gradients are reduced once all exist. At first only the bucket is added, then also the
        # rank's partition, together with the unfilled rest of the bucket.
        extra = largest + s.bucket if largest > s.bucket else largest
        gradients = size * (trained + max(s.bucket, s.shard + extra))
    flat = size * (total + trained)
    init = size * total + 2 * s.master_bytes * s.shard
    if s.offload_optimizer:
        resident, init = size * (total + largest), size * (total + s.shard)
        if not in_fp32:
            # After their norm is computed in fp64, each bucket's gradients move to the host. On the
            # last rank, activations still exist then.
            flattened = size * min(trained, s.bucket) if s.slots > 1 else 0
            temporary = bucket + max(8 * largest, flattened)
            reduction = 0.0 if s.reduces_last else temporary
            return _Parts(init, resident, 0, bucket, temporary, 0, reduction, flat=flat)
    else:
        resident = size * total + s.state_bytes * s.shard
    if in_fp32:
        whole = 4.0 * trained if stage == 1 else 0.0
        accumulated = (whole or 4 * s.shard) if s.gas > 1 else 0.0
        cast = size * (min(trained, s.bucket) + 2 * largest)
        step = max(4 * s.shard + 8 * min(largest, s.shard), accumulated)
        gradients = bucket + 4 * s.shard + whole + cast - accumulated
        return _Parts(init, resident, accumulated, bucket, gradients, step, flat=flat)
    step = (2 * size + s.cast_bytes) * s.shard if size == 2 else 8 * s.shard
    if s.shard < 2 * largest and s.slots > 1:
        step += size * largest
    # The last rank allocates its whole partition of gradients with its first bucket, unless one
    # bucket holds all gradients.
    first = size * max(s.shard, largest)
    if s.reduces_last or (stage == 1 and s.buckets == 1):
        first = 0.0
    if s.gas == 1 or stage == 2:
        accumulated = size * s.shard if s.gas > 1 else 0.0
        reduction = bucket + first if first else 0.0
        return _Parts(init, resident, accumulated, bucket, gradients, step, reduction, flat=flat)
    accumulated = size * trained + bucket
    return _Parts(init, resident, accumulated, 0, gradients - accumulated, step, first, flat=flat)


def _stage_3(s: Setup) -> _Parts:
    total, trained, size = s.facts.num_params, s.facts.trainable_params, s.model_bytes
    bucket, largest = s.bucket * size, s.facts.largest_param
    copy = 0 if s.offload_param else s.secondary_bytes
    partition = 0 if s.offload_param else size * total / s.slots + copy
    reduced = size * min(trained, s.bucket)
    # Extra bytes while the largest parameter is partitioned.
    extra = size * largest * (1 + (1 / s.slots if s.offload_param else 0))
    gathers = s.slots > 1 or s.offload_param
    # A parameter is gathered whole, whatever the limit.
    live = size * min(total, max(s.live, largest)) if gathers else 0.0
    if copy:  # parameters that are still gathered after a step have no secondary copy
        live -= copy * live / (size * total)
    gather = size * min(total, s.prefetch) * (1 + 1 / s.slots) if s.slots > 1 else 0
    if s.offload_optimizer:
        # After the norm of each gradient in fp64, the rank's part of each bucket moves to the host.
        part = largest / s.slots
        temporary = max(reduced, size * largest) + size * part + 8 * min(part, _NORM_BUFFER)
        if s.accumulation_bytes > size:
            temporary += s.accumulation_bytes * min(trained, s.bucket) / s.slots
        reduction = 0.0 if s.reduces_last else temporary
        if largest > s.bucket:  # the largest is reduced first, when little else is gathered
            reduction -= max(0, live - size * (largest + 2 * s.prefetch))
            if s.slots > 1:  # the whole gradient is freed before the norm of its part
                reduction -= size * largest
        # Master weights, gradients and both moments that a partial offload leaves on the device.
        kept_master = s.master_bytes * sum(s.kept_groups)
        resident = bucket + partition + 4 * kept_master
        init = resident - 2 * kept_master + extra  # moments are allocated in the first step
        step = s.master_bytes * max(s.kept_groups, default=0.0)
        gradients = temporary if largest <= s.bucket else reduced
        return _Parts(init, resident, live, 0, gradients, step, reduction, gather)
    group = min(s.shard, s.sub_groups.size)
    resident = partition + (s.accumulation_bytes + s.state_bytes) * s.shard + bucket
    moments = 2 * s.moment_bytes * s.shard  # allocated in the first step
    init = max(resident - moments + extra, partition + 2 * s.master_bytes * s.shard)
    step = (s.accumulation_bytes + s.cast_bytes) * group if size == 2 else 4 * group
    if s.accumulation_bytes > size:  # gradients are cast as they are reduced, not in the step
        reduced, step = reduced + s.accumulation_bytes * reduced // size, 4 * group
    if s.torch_adam:
        step = max(step, 8 * group)
    return _Parts(init, resident, live, 0, reduced, step, gather=gather)
