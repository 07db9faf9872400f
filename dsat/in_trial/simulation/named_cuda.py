"""Scripts that name CUDA instead of asking for the accelerator, on the simulation's device.

`device="cuda"` becomes the simulation's device, `torch.cuda`'s functions do nothing, and
`torch.autocast("cuda")`, which would leave a private device alone, casts as CUDA's does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

_CUDA = "cuda"
# The lists of aten/src/ATen/autocast_mode.h, as far as Python calls them.
_IN_LOW_PRECISION = frozenset(
    {
        functional.linear,
        functional.conv1d,
        functional.conv2d,
        functional.conv3d,
        functional.conv_transpose1d,
        functional.conv_transpose2d,
        functional.conv_transpose3d,
        functional.scaled_dot_product_attention,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        torch.einsum,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.mm,
        torch.Tensor.bmm,
    }
)
_IN_FULL_PRECISION = frozenset(
    {
        functional.softmax,
        functional.log_softmax,
        functional.layer_norm,
        functional.group_norm,
        functional.cross_entropy,
        functional.nll_loss,
        functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss,
        functional.kl_div,
        functional.cosine_similarity,
        torch.softmax,
        torch.log_softmax,
        torch.exp,
        torch.log,
        torch.pow,
        torch.sum,
        torch.norm,
        torch.Tensor.softmax,
        torch.Tensor.log_softmax,
        torch.Tensor.exp,
        torch.Tensor.log,
        torch.Tensor.pow,
        torch.Tensor.sum,
        torch.Tensor.norm,
    }
)
_DO_NOTHING = (
    "synchronize empty_cache set_device reset_peak_memory_stats reset_max_memory_allocated "
    "manual_seed manual_seed_all ipc_collect init"
).split()


def forget_the_real_one() -> None:
    """Makes `torch.cuda` of a forked process harmless; for the rest of the process."""
    for name in _DO_NOTHING:
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    constants: dict[str, Any] = {
        "is_available": True,  # else autocast turns itself off
        "is_bf16_supported": True,
        "current_device": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
    }
    for name, value in constants.items():
        setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
    for name in ("device", "stream"):
        setattr(torch.cuda, name, lambda *args, **kwargs: contextlib.nullcontext())


def renamed(value: Any, device: str) -> Any:
    """The simulation's device for CUDA's."""
    if isinstance(value, torch.device) and value.type == _CUDA:
        return torch.device(device)
    if isinstance(value, str) and (value == _CUDA or value.startswith(f"{_CUDA}:")):
        return device
    return value


def as_autocast(func: Callable[..., Any], args: Any, kwargs: Any, device: str) -> tuple[Any, Any]:
    """A function's arguments as CUDA's autocast would cast them, if one is entered.

    The script's own is for CUDA, DeepSpeed's for the simulation's device; a CPU's casts by itself.
    """
    if device == "cpu":
        return args, kwargs
    entered = [name for name in (_CUDA, device) if torch.is_autocast_enabled(name)]
    if not entered:
        return args, kwargs
    if func in _IN_LOW_PRECISION:
        dtype = torch.get_autocast_dtype(entered[0])
    elif func in _IN_FULL_PRECISION:
        dtype = torch.float32
    else:
        return args, kwargs
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        kinds = (torch.float32, torch.float16, torch.bfloat16)
        return value.to(dtype) if value.dtype in kinds and value.dtype != dtype else value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_cast(part, dtype) for part in value)
    if type(value) is dict:
        return {key: _cast(part, dtype) for key, part in value.items()}
    return value
