"""Facts about a model from one training step: its parameters, FLOPs and activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dsat.in_trial import config_injection, losses
from dsat.in_trial.adapters.trial import TRIAL
from dsat.in_trial.agreement import local_size
from dsat.in_trial.batches import BatchCounter
from dsat.in_trial.losses import MUON
from dsat.in_trial.meter_spec import MeterSpec
from dsat.values import host_limits
from dsat.values.outcome import ModelProfile, OwnOptimizer

if TYPE_CHECKING:
    import torch


# Optimizers that update each element independently: those that ZeRO supports (0.19.8,
# runtime/zero/utils.py), and others. DeepSpeed's Muon counts as one unless gradients are clipped,
# because ZeRO keeps the shapes for it. Adafactor, LAMB and other versions of Muon are not.
_BY_ELEMENT = """
    ASGD Adadelta Adagrad Adam AdamW Adamax DeepSpeedCPUAdagrad DeepSpeedCPUAdam DeepSpeedCPULion
    FusedAdam FusedLion Lion MuonWithAuxAdam NAdam RAdam RMSprop Rprop SGD ZenFlowCPUAdam
""".split()


class ModelProfiler:
    """Counter of parameters, FLOPs and activations in the first micro step, if a trial profiles.

    Attributes:
        flops_per_sample: FLOPs of forward and backward pass, without recomputation; 0 until they
            are counted.
    """

    def __init__(self, engine: Any, spec: MeterSpec) -> None:
        self._engine = engine
        self._spec = spec
        self._flops: Any = None
        self._counting = False
        self._is_done = not spec.profile
        self._storages: dict[int, int] = {}
        self._hooks: Any = None
        self.flops_per_sample = 0.0

    def enter_forward(self) -> None:
        import torch

        if self._is_done or self._counting:
            return
        self._counting, self._flops = True, _count_flops()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._flops.__enter__()
        self._hooks.__enter__()

    def leave_forward(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def finish_micro_steps(self, count: int) -> None:
        """End the count of FLOPs after `count` micro steps: several if the script accumulates."""
        if self._counting and not self._is_done:
            self._flops.__exit__(None, None, None)
            slot_flops = self._flops.get_total_flops() / (self._spec.micro_batch * count)
            self.flops_per_sample = slot_flops * self._spec.parallelism.shared
        self._counting, self._is_done = False, self._is_done or self._counting

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that autograd keeps for the backward pass, unless it is a parameter."""
        import torch

        parameter = torch.nn.Parameter
        if not isinstance(tensor, parameter) and not isinstance(tensor._base, parameter):
            self._storages.update(_storages_of(tensor))
        return tensor

    def result(self, counter: BatchCounter) -> ModelProfile | None:
        """Return the profile; None if the trial does not profile."""
        from deepspeed.accelerator import get_accelerator

        if not self._spec.profile:
            return None
        accelerator = get_accelerator()
        host_bytes = _part_of_host(local_size())
        storages = [0, *self._storages.values()]
        parameters = list(self._engine.module.parameters())
        sizes = [self._whole_size(parameter) for parameter in parameters]
        trainable = [n for p, n in zip(parameters, sizes, strict=True) if p.requires_grad]
        return ModelProfile(
            num_params=sum(sizes),
            trainable_params=sum(trainable),
            param_bytes=max((p.element_size() for p in parameters), default=4),
            activation_bytes_per_sample=sum(storages) // self._spec.micro_batch,
            largest_activation_bytes_per_sample=max(storages) // self._spec.micro_batch,
            flops_per_sample=self.flops_per_sample,
            batch_dimensions=counter.dimensions,
            fed_instead=counter.fed_instead,
            switches={} if TRIAL.trainer is None else dict(TRIAL.trainer.switches.found),
            slot_memory_bytes=self._slot_memory(accelerator),
            host_memory_bytes=0 if accelerator.is_synchronized_device() else host_bytes,
            device_name=device_name(accelerator),
            parallelism=self._spec.parallelism,
            attention_heads=attention_heads(self._engine.module),
            hidden_size=hidden_size(self._engine.module),
            optimizer=_own_optimizer(self._engine),
        )

    def _whole_size(self, parameter: Any) -> int:
        """Return a parameter's size before ZeRO and AutoTP divide it (module_inject/layers.py)."""
        size = int(getattr(parameter, "ds_numel", parameter.numel()))
        is_divided = getattr(parameter, "tensor_model_parallel", False)
        return size * self._spec.parallelism.tensor if is_divided else size

    def _slot_memory(self, accelerator: Any) -> int:
        if accelerator.is_synchronized_device():
            total_bytes = _part_of_host(max(1, self._spec.host_slots))
        else:
            total_bytes = int(accelerator.total_memory())
        return min(total_bytes, self._spec.options.slot_memory_bytes or total_bytes)


def _storages_of(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield addresses and bytes of a tensor's storages; jagged tensors have several."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages_of(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        yield storage.data_ptr(), storage.nbytes()


def device_name(accelerator: Any, index: int | None = None) -> str:
    """Return the driver's name of a device, by default the current one; empty for a CPU."""
    import torch

    module = getattr(torch, accelerator.device_name(), None)
    name = getattr(module, "get_device_name", None)
    return str(name(index)) if callable(name) else ""


def attention_heads(module: Any) -> int | None:
    """Return the attention heads in a Hugging Face model's configuration; None if unknown."""
    config: Any = getattr(module, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def hidden_size(module: Any) -> int | None:
    """Return the hidden size that transformers' Trainer finds in a model; None if there is none.

    If the model has several, this is the largest (`trainer_config_finalize` in
    integrations/deepspeed.py).
    """
    top_config: Any = getattr(module, "config", None)
    for config in (top_config, getattr(top_config, "text_config", None)):
        size = getattr(config, "hidden_size", None) or getattr(config, "hidden_sizes", None)
        sizes = size if isinstance(size, (list, tuple)) else [size]
        if size and all(isinstance(n, int) for n in sizes):
            return int(max(sizes))
    return None


def _own_optimizer(engine: Any) -> OwnOptimizer:
    """Describe the optimizer that an engine wraps.

    When offloading, accelerate (1.15: `map_pytorch_optim_to_deepspeed`) replaces a few optimizers
    by equivalents, and all others by Adam.
    """
    import torch

    optimizer = engine.basic_optimizer
    kind = type(optimizer).__name__
    clips_updates = kind == MUON and engine.gradient_clipping() > 0  # see losses.py
    torchs = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
    has_equivalent = type(optimizer) in torchs or kind.startswith("DeepSpeedCPU")
    return OwnOptimizer(
        kind,
        by_element=kind in _BY_ELEMENT and not clips_updates,
        moves_to_host=has_equivalent and config_injection.accelerate_makes_engines(),
    )


def _part_of_host(sharers: int) -> int:
    """Return the bytes of this process's resident set plus its share of available host memory."""
    import psutil

    rss_bytes = psutil.Process().memory_info().rss
    return int(host_limits.available_bytes() / sharers + rss_bytes)


def _count_flops() -> Any:
    """Return a FLOP counter that excludes the recomputation of activation checkpointing."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    class ModelFlops(FlopCounterMode):
        def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
            # In a backward pass autograd records nothing, unless activations are recomputed.
            if losses.is_in_backward() and torch.is_grad_enabled():
                return out
            return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]

    return ModelFlops(display=False)
