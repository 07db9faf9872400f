"""Sizes of a model and settings of DeepSpeed: the input of the memory formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from dsat.command import ds_config
from dsat.values import parallelism
from dsat.values.outcome import ModelProfile
from dsat.values.parallelism import DATA_ONLY, Parallelism
from dsat.values.zero_strategy import CPU, NONE, Strategy, read_strategy

TYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model and its activations: of the whole model, or (in `Setup`) one slot's share.

    Attributes:
        num_params, trainable_params: numbers of elements.
        largest_param: elements of the largest trained parameter; 0 if unknown.
        usual_param: elements of the parameter to which the median trained element belongs, if
            parameters are ordered by size; 0 if unknown.
        kept_params: elements that AutoTP does not divide, such as embeddings; 0 if unknown.
        forward_bytes_per_sample: peak of activations in the forward pass, including the loss.
        backward_bytes_per_sample: peak of activations in the backward pass, without gradients of
            parameters.
        first_gradient_bytes_per_sample: activations that exist when the first gradient does.
        matmul_bytes_per_sample: peak of activations while matrices are multiplied.
        held_bytes_per_sample: memory that remains after the backward pass: the batch itself, and
            outputs that the script keeps.
        matmul_bytes: other memory while matrices are multiplied: first gradients, cuBLAS workspace.
        workspace_bytes: workspace of cuBLAS.
        param_bytes: bytes per element in the forward pass, unless a configuration sets fp16 or
            bf16.
        uses_zero_init: whether stage 3 partitions parameters as they are made, so that no slot ever
            has all of them.
        hidden_size: hidden size, from which a Trainer computes "auto" sizes; None if unknown.
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
    usual_param: int = 0
    param_bytes: int = 2
    uses_zero_init: bool = True
    hidden_size: int | None = None
    kept_params: int = 0

    @classmethod
    def of_profile(cls, profile: ModelProfile) -> ModelFacts:
        """Derive facts from a profile, which counts the activations kept for the backward pass.

        Two activations are added: the input and output of the current operator, or their gradients.
        At the peak, they have the size of the largest activation, usually the logits.
        """
        slot_bytes = profile.activation_bytes_per_sample
        slot_bytes += 2 * profile.largest_activation_bytes_per_sample
        slope = slot_bytes / profile.parallelism.activations_kept
        return cls(
            num_params=profile.num_params,
            trainable_params=profile.trainable_params,
            largest_param=0,
            forward_bytes_per_sample=slope,
            backward_bytes_per_sample=slope,
            first_gradient_bytes_per_sample=slope,
            param_bytes=profile.param_bytes,
            hidden_size=profile.hidden_size,
        )

    def scaled(self, factor: float) -> ModelFacts:
        """Return the facts with all bytes per sample multiplied by a factor."""
        names = [field.name for field in fields(self) if field.name.endswith("_per_sample")]
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def divided(self, shared: Parallelism) -> ModelFacts:
        """Return one slot's share under tensor and sequence parallelism."""
        if shared == DATA_ONLY:
            return self

        def slot_share(size: int) -> int:
            whole = min(size, self.kept_params)  # an upper bound if parts are frozen
            return whole + (size - whole) // shared.tensor

        return replace(
            self.scaled(shared.activations_kept),
            num_params=slot_share(self.num_params),
            trainable_params=slot_share(self.trainable_params),
            largest_param=slot_share(self.largest_param),
            usual_param=self.usual_param // shared.tensor,
        )


class SubGroups(NamedTuple):
    """Settings of stage 3's sub-groups, groups of parameters that are updated together.

    Attributes:
        size: elements of each sub-group.
        ratio: fraction of the sub-groups whose state is offloaded, if the optimizer is offloaded.
    """

    size: int
    ratio: float

    @classmethod
    def of(cls, zero: Mapping[str, Any]) -> SubGroups:
        """Read the `zero_optimization` section of a configuration."""
        offload = zero.get("offload_optimizer")
        ratio = offload.get("ratio") if isinstance(offload, Mapping) else None
        if not isinstance(ratio, (int, float)):
            ratio = 1.0
        return cls(_size(zero, "sub_group_size", 10**9), ratio)


@dataclass(frozen=True)
class Setup:
    """Settings of a configuration on which memory depends.

    Attributes:
        facts: one slot's share of the model.
        slots: number of slots in a ZeRO group.
        accumulation_bytes, master_bytes, moment_bytes: bytes per element of accumulated gradients,
            of master weights and of a moment.
        bucket, live, prefetch: numbers of elements in a gradient bucket, of parameters that stay
            gathered, and of parameters to prefetch.
        buckets: number of gradient buckets.
        hpz: slots that share a secondary copy of the parameters; at most 1 if there is none.
    """

    facts: ModelFacts
    slots: int
    accumulation_bytes: int
    model_type: str
    master_bytes: int
    moment_bytes: int
    gas: int
    bucket: int
    buckets: int
    sub_groups: SubGroups
    live: int
    prefetch: int
    hpz: int
    torch_adam: bool
    strategy: Strategy

    @classmethod
    def of(cls, facts: ModelFacts, config: Mapping[str, Any], slots: int) -> Setup:
        """Read a whole DeepSpeed configuration for a trial with `slots` slots."""
        zero = config.get("zero_optimization") or {}
        zero = ds_config.fill_in_sizes(zero, facts.hidden_size)
        model_type, accumulated = ds_config.data_types(config)
        model_type = model_type or ("bf16" if facts.param_bytes == 2 else "fp32")
        optimizer = (config.get("optimizer") or {}).get("params") or {}
        low_master, low_moments = _low_precision_state(config)
        shared = parallelism.read_parallelism(config)
        return cls(
            facts=facts.divided(shared),
            slots=max(1, slots // shared.tensor),  # slots with the same part of each layer
            accumulation_bytes=TYPE_BYTES[accumulated or model_type],
            model_type=model_type,
            master_bytes=2 if low_master else 4,
            moment_bytes=2 if low_moments else 4,
            gas=_size(config, "gradient_accumulation_steps", 1),
            # Defaults of zero/config.py.
            bucket=_size(zero, "reduce_bucket_size", 5 * 10**8),
            buckets=2 if zero.get("overlap_comm") is True else 1,
            sub_groups=SubGroups.of(zero),
            live=_size(zero, "stage3_max_live_parameters", 10**9),
            prefetch=_size(zero, "stage3_prefetch_bucket_size", 5 * 10**7),
            hpz=_size(zero, "zero_hpz_partition_size", 1),
            torch_adam=bool(optimizer.get("torch_adam", False)),
            strategy=read_strategy(config),
        )

    @property
    def model_bytes(self) -> int:
        return 2 if self.model_type in ("bf16", "fp16") else self.facts.param_bytes  # per element

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
    def groups(self) -> list[float]:
        """Elements of each of the rank's sub-groups, in stage 3.

        A sub-group ends with the parameter that fills it, so it exceeds the configured size by up
        to the size of that parameter.
        """
        excess = self.facts.usual_param / self.slots
        mean = self.sub_groups.size + excess / 2
        count = int(self.shard // mean) if mean else 0
        groups = [self.sub_groups.size + excess * (n + 0.5) / count for n in range(count)]
        rest = self.shard - sum(groups)
        return [*groups, rest] if rest > 0 else groups

    @property
    def kept_groups(self) -> list[float]:
        """The first of `groups`, whose optimizer state a partial offload leaves on the device.

        See `_create_fp32_partitions` in runtime/zero/stage3.py, 0.19.8.
        """
        is_partial = self.strategy.stage == 3 and self.strategy.offload_optimizer == CPU
        if not is_partial or self.sub_groups.ratio == 1:
            return []
        groups = self.groups
        return groups[: int((1 - self.sub_groups.ratio) * len(groups))]

    @property
    def secondary_bytes(self) -> float:
        """Bytes per slot of the secondary copy of the parameters (hpZ) in stage 3; 0 without it."""
        whole = self.model_bytes * self.facts.num_params
        return whole / min(self.hpz, self.slots) if self.hpz > 1 else 0.0

    @property
    def reduces_last(self) -> bool:
        """Return whether one bucket holds all gradients, which are then reduced last."""
        return self.facts.trainable_params <= self.bucket

    @property
    def state_bytes(self) -> int:
        return self.master_bytes + 2 * self.moment_bytes  # of each trained parameter

    @property
    def cast_bytes(self) -> int:
        return 4 if self.master_bytes == 4 else 0  # of a gradient in fp32


def _size(section: Mapping[str, Any], key: str, default: int) -> int:
    """Return a setting, or the default if it is missing or not a number, such as "auto"."""
    value = section.get(key)
    return int(value) if isinstance(value, (int, float)) else default


def _low_precision_state(config: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether master weights, and whether moments, have the model's own type.

    runtime/precision_config.py declares the settings, such as `bf16_optimizer_states`.
    """
    bf16 = config.get("bf16") or config.get("bfloat16") or {}
    fp16 = config.get("fp16") or {}
    low_master = bf16.get("bf16_master_weights_and_grads") is True
    low_moments = low_master and bf16.get("bf16_optimizer_states") is True
    return low_master or fp16.get("fp16_master_weights_and_grads") is True, low_moments
