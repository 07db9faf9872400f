"""A model and a DeepSpeed configuration, as the closed form reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dsat.command import ds_config
from dsat.values import parallelism
from dsat.values.outcome import ModelProfile
from dsat.values.parallelism import Parallelism
from dsat.values.zero_strategy import NONE, Strategy, of_config

TYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model, and of whole samples on a slot, for the closed form.

    Attributes:
        num_params, trainable_params: elements.
        largest_param: elements of the largest trained one.
        usual_param: elements of the one that has the median of all trained elements.
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
        hidden_size: by which a Trainer replaces "auto" sizes; None if it is not known.
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
            hidden_size=profile.hidden_size,
        )

    def scaled(self, factor: float) -> ModelFacts:
        """Return the facts of samples whose activations are so much larger."""
        names = [field.name for field in fields(self) if field.name.endswith("_per_sample")]
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def divided(self, shared: Parallelism) -> ModelFacts:
        """Return the part of a slot where several share layers and sequences."""
        sizes = ("num_params", "trainable_params", "largest_param", "usual_param")
        of_slot = {name: getattr(self, name) // shared.tensor for name in sizes}
        return replace(self.scaled(shared.activations_kept), **of_slot)


@dataclass(frozen=True)
class Setup:
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

    @classmethod
    def of(cls, facts: ModelFacts, config: Mapping[str, Any], slots: int) -> Setup:
        """Read a whole DeepSpeed configuration on a number of slots."""
        zero = config.get("zero_optimization") or {}
        zero = ds_config.fill_in_sizes(zero, facts.hidden_size)
        model_type, accumulated = ds_config.data_types(config)
        size = 2 if model_type in ("bf16", "fp16") else facts.param_bytes
        model_type = model_type or ("bf16" if size == 2 else "fp32")
        optimizer = (config.get("optimizer") or {}).get("params") or {}
        low_master, low_moments = _low_precision_state(config)
        shared = parallelism.of_config(config)
        return cls(
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
    def reduces_last(self) -> bool:
        """True if one bucket holds all gradients; it is reduced after the backward pass."""
        return self.facts.trainable_params <= self.bucket

    @property
    def state_bytes(self) -> int:
        return self.master_bytes + 2 * self.moment_bytes  # of each trained parameter

    @property
    def cast_bytes(self) -> int:
        return 4 if self.master_bytes == 4 else 0  # of a gradient, for master weights of fp32


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
