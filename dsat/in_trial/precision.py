"""Precision of a training, which decides how far rounding can make two equal trainings differ.

The DeepSpeed configuration does not show the precision: scripts autocast by themselves, load their
weights in half precision, or allow TF32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsat.in_trial.adapters.calls import Call
from dsat.values.outcome import PRECISIONS

_entered: set[str] = set()


def enter_autocast(call: Call) -> Any:
    """Record the precision of autocasting."""
    import torch

    result, device = call.proceed(), call.owner.device
    if torch.is_autocast_enabled(device):
        _entered.add(_name_dtype(torch.get_autocast_dtype(device)))
    return result


def find(engine: Any) -> str:
    """Return the coarsest precision of an engine's training so far: one of `PRECISIONS`."""
    import torch

    precisions = {*_entered, *(_name_dtype(p.dtype) for p in engine.module.parameters())}
    if torch.device(engine.device).type == "cuda" and _allows_tf32(engine.module.modules()):
        precisions.add("fp16")  # TF32 has as many mantissa bits
    return max(precisions, key=PRECISIONS.index, default=PRECISIONS[0])


def _name_dtype(dtype: Any) -> str:
    """Return the precision of computing with weights of a type; bf16 for quantised weights."""
    import torch

    if dtype is torch.float16:
        return "fp16"
    return "fp32" if dtype.itemsize >= 4 and dtype.is_floating_point else "bf16"


def _allows_tf32(modules: Iterable[Any]) -> bool:
    import torch

    if torch.backends.cuda.matmul.allow_tf32:
        return True
    convolutions = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in modules)
    return convolutions and torch.backends.cudnn.allow_tf32
