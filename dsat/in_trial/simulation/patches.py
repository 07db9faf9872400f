"""Changes to torch and DeepSpeed that let an engine run on fake tensors.

But for `for_fake_cpu`, only ever done in a process that is forked for one simulation and does
nothing else. Each change has its reason beside it. Seen with torch 2.15 and deepspeed 0.19.8.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dsat.in_trial.simulation import named_cuda
from dsat.in_trial.simulation.attention import attention
from dsat.in_trial.simulation.fake_device import DEVICE_TYPE
from dsat.in_trial.simulation.fake_parameters import is_scripts
from dsat.in_trial.simulation.storage_tracker import StorageTracker
from dsat.in_trial.versions import collectives

aten = torch.ops.aten
FAKE_GROUP = "fake"  # torch.testing's backend of collectives that do nothing


class SimulationUnsupported(Exception):
    """The script does what cannot be simulated faithfully."""


class FunctionRules(TorchFunctionMode):
    """Gives functions fake tensors of the simulation for the script's own, whoever calls them.

    Args:
        adopt: turns a tensor of the script's into a fake one of the simulation.
        as_cpu: attention as on a CPU.
    """

    def __init__(self, adopt: Callable[[torch.Tensor], torch.Tensor], *, as_cpu: bool) -> None:
        super().__init__()
        self._adopt = adopt
        self._device = "cpu" if as_cpu else DEVICE_TYPE
        self._replaced: dict[Any, Callable[..., Any]] = {
            functional.scaled_dot_product_attention: functools.partial(_attention, as_cpu),
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = self._adopted(args), self._adopted(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        return self._replaced.get(func, func)(*args, **kwargs)

    def _adopted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            own = isinstance(value, FakeTensor) and not is_scripts(value)
            return value if own else self._adopt(value)
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(self._adopted(part) for part in value)
        if type(value) is dict:
            return {key: self._adopted(part) for key, part in value.items()}
        return named_cuda.renamed(value, self._device)


def _attention(
    as_cpu: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The fused kernels that torch would choose: the choice asks the device, which is none."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t.to(dtype) for t in (query, key, value))
    if not as_cpu:
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if query.dim() != 4:
        raise SimulationUnsupported("attention on tensors that have no four dimensions")
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


class _NoOperator:
    """A compiled operator that allocates nothing and returns nothing, as Adam's does."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def apply(tracker: StorageTracker, device_type: str) -> None:
    """Applies the patches; for the rest of the process."""
    from deepspeed.accelerator import get_accelerator

    # The optimizer's multi-tensor form is chosen by exact types.
    optimizers = importlib.import_module("torch.optim.optimizer")
    optimizers._foreach_supported_types.append(FakeTensor)
    # A fake mode would first make a real tensor to initialise the device.
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment,method-assign]
    _remove_operators()
    # DeepSpeed's Muon compiles a function at its import, which takes seconds.
    torch.compile = _not_compiled  # type: ignore[assignment]
    # They compare values, and fake collectives move none.
    for name in ("zero.partition_parameters", "zero.partitioned_param_coordinator", "zero.stage3"):
        module: Any = importlib.import_module(f"deepspeed.runtime.{name}")
        module.assert_ints_same_as_other_ranks = lambda *args, **kwargs: None
    # Fake tensors have no address, and DeepSpeed looks at alignments.
    torch.Tensor.data_ptr = lambda self: 0  # type: ignore[method-assign]
    # Only delays when memory is used again.
    torch.Tensor.record_stream = lambda self, s: None  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_: get_accelerator().pin_memory(self)  # type: ignore[method-assign]
    # The functions themselves, for callers that another function stands above; see FunctionRules.
    functional.scaled_dot_product_attention = functools.partial(_attention, device_type == "cpu")
    _patch_moves(tracker, device_type)
    named_cuda.forget_the_real_one()


@contextlib.contextmanager
def for_fake_cpu() -> Iterator[None]:
    """DeepSpeed as it can be used with fake tensors on the CPU, in the process of a script."""
    restore = _remove_operators()
    data_ptr, to = torch.Tensor.data_ptr, torch.nn.Module.to
    torch.Tensor.data_ptr = lambda self: 0  # type: ignore[method-assign]
    torch.nn.Module.to = lambda self, *_, **__: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.data_ptr, torch.nn.Module.to = data_ptr, to  # type: ignore[method-assign]
        restore()


def _not_compiled(function: Any = None, **_: Any) -> Any:
    """Stand-in for `torch.compile`."""
    return _not_compiled if function is None else function


def _remove_operators() -> Callable[[], None]:
    """Operators would be compiled, and would read memory. Returns what undoes it."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    communication: Any = importlib.import_module("deepspeed.comm.torch")
    places = ((OpBuilder, "load"), (OpBuilder, "is_compatible"), (communication, "build_shm_op"))
    before = [getattr(place, name) for place, name in places]
    OpBuilder.load = lambda self, verbose=True: _NoOperator()
    OpBuilder.is_compatible = lambda self, verbose=False: True
    communication.build_shm_op = lambda: None  # the CPU's all-reduce in shared memory

    def restore() -> None:
        for (place, name), value in zip(places, before, strict=True):
            setattr(place, name, value)

    return restore


def forget_process_groups() -> None:
    """Makes DeepSpeed know of no process group, as at its first import."""
    import deepspeed.comm.comm
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    importlib.reload(sys.modules["deepspeed.utils.groups"])


def make_process_group(size: int, device_type: str) -> None:
    """A process group of so many ranks whose collectives do nothing; this is rank 0."""
    import torch.distributed

    # Makes the backend known, which a fresh process has not got by itself.
    fake: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    store = fake.FakeStore()
    torch.distributed.Backend.backend_capability[FAKE_GROUP] = ["cpu", "cuda", device_type]
    torch.distributed.init_process_group(FAKE_GROUP, store=store, rank=0, world_size=size)
    collectives.take_fake_tensors()


def _patch_moves(tracker: StorageTracker, device_type: str) -> None:
    """A module's move to the device: parked parameters get storages that count as the device's."""
    original = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == device_type:
            for tensor in (*self.parameters(), *self.buffers()):
                if isinstance(tensor, FakeTensor) and tracker.is_parked(tensor):
                    tensor.data = torch.empty_like(tensor)
        return self if dtype is None else original(self, dtype)

    torch.nn.Module.to = to  # type: ignore[assignment,method-assign]
