"""Bytes that a configuration needs, in closed form, at once.

The table behind it was read from deepspeed 0.19.8 (`runtime/zero/stage_1_and_2.py`, `stage3.py`,
`bf16_optimizer.py`, `fp16/fused_optimizer.py`, `engine.py`) and is held against the simulation by a
test. Letters as usual there: P parameters, T of them trained, n = T / ranks, S bytes of the model's
type, A of the type in which gradients are accumulated. For Adam; other optimizers with two moments
need the same, those with fewer need less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dsat.command import ds_config
from dsat.memory.estimate import PHASES, MemoryEstimate
from dsat.values import parallelism
from dsat.values.outcome import ModelProfile
from dsat.values.parallelism import Parallelism
from dsat.values.zero_strategy import NONE, NVME, Strategy, of_config

# What torch gives cuBLAS on Hopper and later (`getChosenWorkspaceSize` of CUDABlas.cpp; 8 MiB
# before), and cuBLASLt, which multiplies where a bias is added.
MATMUL_WORKSPACE_BYTES, BIASED_WORKSPACE_BYTES = 32 * 2**20, 2**20
_ALL_REDUCE_BUCKET = 5 * 10**8  # engine.py: MEMORY_OPT_ALLREDUCE_SIZE
TYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model, and of whole samples on a slot, for the closed form.

    Attributes:
        num_params, trainable_params: elements.
        largest_param: elements of the largest trained one.
        forward_bytes_per_sample: activations at their largest in the forward pass, the loss's own
            among them.
        backward_bytes_per_sample: at their largest in the backward pass, gradients of parameters
            not counted.
        first_gradient_bytes_per_sample: those that are left when the first gradient is there.
        matmul_bytes_per_sample: those that are there while matrices are multiplied, at most.
        held_bytes_per_sample: what is left of a batch after the backward pass: the batch itself,
            and what the script keeps of the outputs.
        matmul_bytes: beside them, the first gradients and what the device's library takes.
        workspace_bytes: what that takes, whatever is multiplied.
        param_bytes: of a parameter in the forward pass, where a configuration enables no type.
        uses_zero_init: stage 3 divides parameters as they are made; else a slot has all once.
    """

    num_params: int
    trainable_params: int
    largest_param: int
    forward_bytes_per_sample: float
    backward_bytes_per_sample: float
    first_gradient_bytes_per_sample: float
    matmul_bytes_per_sample: float = 0.0
    held_bytes_per_sample: float = 0.0
    matmul_bytes: float = 0.0
    workspace_bytes: float = 0.0
    param_bytes: int = 2
    uses_zero_init: bool = True

    @classmethod
    def of_profile(cls, profile: ModelProfile) -> ModelFacts:
        """Return the facts of a profile, which counts what is kept for the backward pass.

        Beside that are an operator's input and output, or the gradients of both: where most is
        kept, those of the largest activation, as a rule the logits.
        """
        of_slot = profile.activation_bytes_per_sample
        of_slot += 2 * profile.largest_activation_bytes_per_sample
        slope = of_slot / profile.parallelism.activations_kept
        return cls(
            num_params=profile.num_params,
            trainable_params=profile.trainable_params,
            largest_param=0,
            forward_bytes_per_sample=slope,
            backward_bytes_per_sample=slope,
            first_gradient_bytes_per_sample=slope,
            param_bytes=profile.param_bytes,
        )

    def scaled(self, factor: float) -> ModelFacts:
        """Return the facts of samples whose activations are so much larger."""
        names = [field.name for field in fields(self) if field.name.endswith("_per_sample")]
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def divided(self, shared: Parallelism) -> ModelFacts:
        """Return the part of a slot where several share layers and sequences."""
        sizes = ("num_params", "trainable_params", "largest_param")
        of_slot = {name: getattr(self, name) // shared.tensor for name in sizes}
        return replace(self.scaled(shared.activations_kept), **of_slot)


@dataclass(frozen=True)
class Line:
    """Bytes that grow with the micro batch: `fixed + per_sample * micro batch`.

    Attributes:
        if_room: DeepSpeed needs so much only on a device that has it.
    """

    fixed: float
    per_sample: float = 0.0
    if_room: bool = False

    def at(self, micro_batch: float) -> float:
        return self.fixed + self.per_sample * micro_batch


def highest(phase: Iterable[Line], micro_batch: float) -> float:
    """The peak of a phase, in bytes."""
    return max(line.at(micro_batch) for line in phase)


@dataclass(frozen=True)
class _Parts:
    """Bytes on the device without activations.

    Attributes:
        init: the peak of `deepspeed.initialize`, parameters flattened on the host.
        resident: held between steps.
        forward: added from the beginning of the forward pass.
        bucket: added with the first gradient, when most activations are still there.
        gradients: added towards its end, when they are gone.
        step: added to what is resident in the optimizer step.
        gather: added to `forward` at the beginning of the pass, when there are no activations.
        flat: the peak while parameters are flattened on the device, as they are where it has room
            for another copy (`available_memory` in runtime/zero/stage_1_and_2.py); 0 if they never
            are.
    """

    init: float
    resident: float
    forward: float
    bucket: float
    gradients: float
    step: float
    gather: float = 0
    flat: float = 0


@dataclass(frozen=True)
class _Setup:
    """A configuration: `facts` are a slot's, `slots` those among which ZeRO divides its state."""

    facts: ModelFacts
    slots: int
    model_bytes: int
    accumulation_bytes: int
    model_type: str
    master_bytes: int
    moment_bytes: int
    gas: int
    bucket: int
    buckets: int
    sub_group: int
    live: int
    prefetch: int
    torch_adam: bool
    strategy: Strategy

    @property
    def offload_optimizer(self) -> bool:
        return self.strategy.offload_optimizer != NONE

    @property
    def offload_param(self) -> bool:
        return self.strategy.offload_param != NONE

    @property
    def shard(self) -> float:
        return self.facts.trainable_params / self.slots

    @property
    def state_bytes(self) -> int:
        return self.master_bytes + 2 * self.moment_bytes  # of each trained parameter

    @property
    def cast_bytes(self) -> int:
        return 4 if self.master_bytes == 4 else 0  # of a gradient, for master weights of fp32


def estimate(
    facts: ModelFacts,
    config: Mapping[str, Any],
    *,
    slots: int,
    micro_batch: int,
) -> MemoryEstimate:
    """Memory of a whole DeepSpeed configuration on a number of slots."""
    phases = lines(facts, config, slots=slots)
    init, forward, backward, step = (round(highest(phases[name], micro_batch)) for name in PHASES)
    pinned, pageable = host(facts, config, slots=slots)
    return MemoryEstimate(init, forward, backward, step, round(pinned), round(pageable))


def lines(
    facts: ModelFacts, config: Mapping[str, Any], *, slots: int
) -> dict[str, tuple[Line, ...]]:
    """Memory on the device for every micro batch: a phase's peak is its `highest`."""
    setup = _setup(facts, config, slots)
    facts = setup.facts
    parts = (_stage_0, _stage_1_or_2, _stage_1_or_2, _stage_3)[setup.strategy.stage](setup)
    held = parts.resident + parts.forward
    flat = (Line(parts.flat, if_room=True),) if parts.flat else ()
    is_whole = setup.strategy.stage == 3 and not facts.uses_zero_init
    whole = setup.model_bytes * facts.num_params if is_whole else 0
    return {
        "init": (Line(max(parts.init, whole)), *flat),
        "forward": (
            Line(held, facts.forward_bytes_per_sample),
            Line(held + parts.gather + facts.workspace_bytes),
        ),
        "backward": (
            Line(held, facts.backward_bytes_per_sample),
            Line(held + facts.matmul_bytes, facts.matmul_bytes_per_sample),
            Line(
                held + parts.bucket + facts.workspace_bytes, facts.first_gradient_bytes_per_sample
            ),
            Line(held + parts.gradients),
        ),
        "step": (Line(parts.resident + parts.step, facts.held_bytes_per_sample),),
    }


def host(facts: ModelFacts, config: Mapping[str, Any], *, slots: int) -> tuple[float, float]:
    """Pinned and pageable bytes of a rank on the host, whatever the micro batch.

    What the script itself holds there is not counted, nor what passes through the host of state on
    NVMe, which is not known.
    """
    s = _setup(facts, config, slots)
    if not s.offload_optimizer or NVME in (s.strategy.offload_optimizer, s.strategy.offload_param):
        return 0, 0
    size = s.model_bytes
    if s.strategy.stage == 3:
        pinned, pageable = [4 * s.shard, size * s.shard], 12 * s.shard
        if s.offload_param:
            pinned.append(size * s.facts.num_params / s.slots)
    else:
        pinned = [4 * s.shard, 4 * s.shard, size * s.shard, size * s.facts.largest_param]
        pageable = 8 * s.shard
    return sum(map(_pinned_block, pinned)), pageable


def _setup(facts: ModelFacts, config: Mapping[str, Any], slots: int) -> _Setup:
    zero = config.get("zero_optimization") or {}
    size = model_bytes(config, facts.param_bytes)
    model_type, accumulated = ds_config.data_types(config)
    model_type = model_type or ("bf16" if size == 2 else "fp32")
    optimizer = (config.get("optimizer") or {}).get("params") or {}
    low_master, low_moments = _low_precision_state(config)
    shared = parallelism.of_config(config)
    return _Setup(
        facts=facts.divided(shared),
        slots=max(1, slots // shared.tensor),  # ZeRO divides among those of other layers' parts
        model_bytes=size,
        accumulation_bytes=TYPE_BYTES[accumulated or model_type],
        model_type=model_type,
        master_bytes=2 if low_master else 4,
        moment_bytes=2 if low_moments else 4,
        gas=_size(config, "gradient_accumulation_steps", 1),
        # Defaults of zero/config.py.
        bucket=_size(zero, "reduce_bucket_size", 5 * 10**8),
        buckets=2 if zero.get("overlap_comm") is True else 1,
        sub_group=_size(zero, "sub_group_size", 10**9),
        live=_size(zero, "stage3_max_live_parameters", 10**9),
        prefetch=_size(zero, "stage3_prefetch_bucket_size", 5 * 10**7),
        torch_adam=bool(optimizer.get("torch_adam", False)),
        strategy=of_config(config),
    )


def _size(section: Mapping[str, Any], key: str, default: int) -> int:
    """A number of the configuration, or its default where it is "auto" or missing."""
    value = section.get(key)
    return int(value) if isinstance(value, (int, float)) else default


def _low_precision_state(config: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return True for master weights, and for moments, that have the type of the model.

    `bf16_master_weights_and_grads`, `bf16_optimizer_states` (runtime/precision_config.py).
    """
    bf16 = config.get("bf16") or config.get("bfloat16") or {}
    fp16 = config.get("fp16") or {}
    low_master = bf16.get("bf16_master_weights_and_grads") is True
    low_moments = low_master and bf16.get("bf16_optimizer_states") is True
    return low_master or fp16.get("fp16_master_weights_and_grads") is True, low_moments


def model_bytes(config: Mapping[str, Any], param_bytes: int) -> int:
    """Bytes of a parameter in the forward pass; `param_bytes`, the script's, if none is enabled."""
    return 2 if ds_config.data_types(config)[0] in ("bf16", "fp16") else param_bytes


def _stage_0(s: _Setup) -> _Parts:
    total, trained, size = s.facts.num_params, s.facts.trainable_params, s.model_bytes
    flat = min(trained, _ALL_REDUCE_BUCKET)
    held = size * trained if s.gas > 1 else 0
    gradients = size * (trained + flat) - held
    if s.model_type == "fp32":  # trained as it is, and reduced in fp32, if it has another type
        resident, cast = size * (total + 2 * trained), 4 * flat if size < 4 else 0
        temporary = (2 if s.torch_adam else 1) * size * trained
        return _Parts(size * total, resident, held, 0, gradients + cast, temporary)
    resident = 2 * total + 12 * trained
    init = 2 * total + (24 - 2 if s.torch_adam else 16) * trained
    return _Parts(init, resident, held, 0, gradients, 10 * trained)


def _stage_1_or_2(s: _Setup) -> _Parts:
    total, trained, size = s.facts.num_params, s.facts.trainable_params, s.model_bytes
    bucket, largest = s.buckets * s.bucket * size, s.facts.largest_param
    stage = s.strategy.stage
    in_fp32 = s.accumulation_bytes > size
    if stage == 1 and in_fp32 and s.model_type == "bf16" and not s.offload_optimizer:
        # BF16_Optimizer; gradients of a micro step stay where they are until the next one's.
        resident = size * total + 4 * trained + 12 * s.shard
        init = max(size * (total + trained), resident - 8 * s.shard)
        held = size * trained if s.gas > 1 else 0.0
        return _Parts(init, resident, held, 0, 2 * size * trained - held, size * trained)
    # Gradients of parameters that touch the rank's own partition, whole; tied ones are there twice,
    # and one that no bucket holds is reduced by itself.
    own = min(trained, max(s.shard, largest) + 3 * largest if s.slots > 1 else trained)
    copies = (2 * largest if stage == 1 else 0) + (2 * largest if largest > s.bucket else 0)
    gradients = bucket + size * (own + copies)
    if stage == 1 and s.buckets == 1:
        # They are reduced when all are there: beside them first the bucket alone, then the rank's
        # partition as well, with what is not filled of the bucket.
        beside = largest + s.bucket if largest > s.bucket else largest
        gradients = size * (trained + max(s.bucket, s.shard + beside))
    flat = size * (total + trained)
    init = size * total + 2 * s.master_bytes * s.shard
    if s.offload_optimizer:
        resident, init = size * (total + largest), size * (total + s.shard)
        if not in_fp32:
            return _Parts(init, resident, 0, bucket, bucket + size * own, 0, flat=flat)
    else:
        resident = size * total + s.state_bytes * s.shard
    if in_fp32:
        whole = 4.0 * trained if stage == 1 else 0.0
        held = (whole or 4 * s.shard) if s.gas > 1 else 0.0
        cast = size * (min(trained, s.bucket) + 2 * largest)
        step = max(4 * s.shard + 8 * min(largest, s.shard), held)
        gradients = bucket + 4 * s.shard + whole + cast - held
        return _Parts(init, resident, held, bucket, gradients, step, flat=flat)
    step = (2 * size + s.cast_bytes) * s.shard if size == 2 else 8 * s.shard
    if s.shard < 2 * largest and s.slots > 1:
        step += size * largest
    if s.gas == 1:
        return _Parts(init, resident, 0, bucket, gradients, step, flat=flat)
    if stage == 2:
        return _Parts(init, resident, size * s.shard, bucket, gradients, step, flat=flat)
    held = size * trained + bucket
    return _Parts(init, resident, held, 0, gradients - held, step, flat=flat)


def _stage_3(s: _Setup) -> _Parts:
    total, trained, size = s.facts.num_params, s.facts.trainable_params, s.model_bytes
    bucket, largest = s.bucket * size, s.facts.largest_param
    own, reduced = size * total / s.slots, size * min(trained, s.bucket)
    live = size * min(total, s.live) if s.slots > 1 or s.offload_param else 0
    gather = size * min(total, s.prefetch) * (1 + 1 / s.slots) if s.slots > 1 else 0
    if s.offload_param:
        # Of a bucket the own part is added to the host's gradients here, and leaves in fp32.
        gradients = 2 * size * largest + (reduced + bucket + 4 * largest) / s.slots
        init = bucket + size * largest * (1 + 1 / s.slots)
        return _Parts(init, bucket, live, gradients, gradients, 0, gather)
    if s.offload_optimizer:
        resident = bucket + own
        gradients = reduced + size * (trained / s.slots + largest)
        return _Parts(resident + size * largest, resident, live, 0, gradients, 0, gather)
    group = min(s.shard, s.sub_group)
    resident = own + (s.accumulation_bytes + s.state_bytes) * s.shard + bucket
    moments = 2 * s.moment_bytes * s.shard  # come with the first step
    init = max(resident - moments + size * largest, own + 2 * s.master_bytes * s.shard)
    step = (s.accumulation_bytes + s.cast_bytes) * group if size == 2 else 4 * group
    if s.accumulation_bytes > size:  # gradients are cast as they are reduced, not in the step
        reduced, step = reduced + s.accumulation_bytes * reduced // size, 4 * group
    if s.torch_adam:
        step = max(step, 8 * group)
    return _Parts(init, resident, live, 0, reduced, step, gather)


def _pinned_block(size: float) -> int:
    """Round up to a power of two, as torch pins memory (ATen/core/CachingHostAllocator.h)."""
    return 1 << (math.ceil(size) - 1).bit_length() if size > 0 else 0
