"""Support for scripts that name CUDA instead of asking for the accelerator.

In a simulation, `device="cuda"` becomes the simulation's device. In the script's process, it
becomes the CPU if there is no CUDA. Common functions of `torch.cuda` then do nothing, or return
constants.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dsat.simulation.fake_device import Stream

_CUDA = "cuda"
_DO_NOTHING = (
    "synchronize empty_cache set_device reset_peak_memory_stats reset_max_memory_allocated "
    "manual_seed manual_seed_all ipc_collect init"
).split()


_MEMORY_BYTES = 80 * 2**30
_CAPABILITY = (9, 0)
_CONSTANTS = {
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,  # asked by optimizers
    "current_device": 0,
    "device_count": 1,
    "get_device_capability": _CAPABILITY,
    "get_device_name": "a device that is simulated",
    "get_device_properties": types.SimpleNamespace(
        name="a device that is simulated",
        total_memory=_MEMORY_BYTES,
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        multi_processor_count=100,
    ),
    "mem_get_info": (_MEMORY_BYTES, _MEMORY_BYTES),
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
    "memory_summary": "",
}


class _OnCpu(TorchFunctionMode):
    """Mode that replaces CUDA with the CPU in the arguments of torch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.device and torch.cuda.is_available():  # see `stand_in`
            return func(*args, **(kwargs or {}))
        args = tuple(renamed(value, "cpu") for value in args)
        kwargs = {key: renamed(value, "cpu") for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def stand_in(*, as_if_available: bool) -> None:
    """Let a script name CUDA where there is none, for the rest of the process.

    Args:
        as_if_available: make `torch.cuda.is_available` return True. `torch.device("cuda")` then
            keeps its type, but tensors created on it are on the CPU.
    """
    from deepspeed.accelerator import get_accelerator

    # `torch.cuda.is_available` is not used: without NVML, and with a MIG device, it initialises
    # CUDA, which is then unusable after a fork.
    if get_accelerator().device_name() == _CUDA:
        return
    _replace_functions()
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    if as_if_available:
        torch.cuda.is_available = lambda: True
    # Else autocast for CUDA turns itself off; later it must apply to the simulation's device.
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    _OnCpu().__enter__()  # type: ignore[no-untyped-call]


def forget_the_real_one() -> None:
    """Make `torch.cuda` touch no real device, for the rest of a forked process."""
    _replace_functions()
    torch.cuda.is_available = lambda: True  # else autocast turns itself off


def _replace_functions() -> None:
    for name in _DO_NOTHING:
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name, value in _CONSTANTS.items():
        setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, Stream)
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, lambda *args, **kwargs: Stream())
    for name in ("device", "stream"):
        setattr(torch.cuda, name, lambda *args, **kwargs: contextlib.nullcontext())


def renamed(value: Any, device: str) -> Any:
    """Return `device` for a value that names CUDA; other values unchanged."""
    if isinstance(value, torch.device) and value.type == _CUDA:
        return torch.device(device)
    if isinstance(value, str) and (value == _CUDA or value.startswith(f"{_CUDA}:")):
        return device
    return value
