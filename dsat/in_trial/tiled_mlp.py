"""MLPs of a model, computed in parts of a sequence by DeepSpeed's `TiledMLP`.

The parts of an MLP are as many as hidden states are longer than wide, as DeepSpeed advises (Arctic
Long Sequence Training, arXiv 2506.13996, section 3.1.1).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensor

from dsat.errors import InvalidTrial

_MOST_SIMULATED = 16  # parts: more take minutes, and are a sixteenth of an MLP's states smaller


def tile(model: torch.nn.Module) -> None:
    """Have each MLP of a model compute in parts.

    Raises:
        InvalidTrial: the model has none, or DeepSpeed no such module.
    """
    tiled, found = _of_deepspeed(), _mlps(model)
    if tiled is None:
        raise InvalidTrial("the installed DeepSpeed is too old for tiled MLPs: it has no TiledMLP")
    if not found:
        raise InvalidTrial("no module of the model is an MLP by the name of its class")
    for module in found:
        vars(module)["forward"] = functools.partial(_in_parts, tiled, module, module.forward)


def can_tile(model: torch.nn.Module) -> bool:
    """Return whether `tile` can change a model."""
    return bool(_mlps(model)) and _of_deepspeed() is not None


def _mlps(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Find MLPs by the names of their classes, as all models of transformers have them."""
    return [module for module in model.modules() if type(module).__name__.endswith("MLP")]


def _of_deepspeed() -> Any:
    """Return DeepSpeed's `TiledMLP`, or None in versions without it."""
    try:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
    except ImportError:
        return None
    return TiledMLP


def _in_parts(
    tiled: Any,
    module: torch.nn.Module,
    forward: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
) -> Any:
    count = math.ceil(x.shape[-2] / x.shape[-1])
    if isinstance(x, FakeTensor):
        count = min(count, _MOST_SIMULATED)
    elif distributed.is_initialized():  # stage 3 gathers parameters for each part on all ranks
        most = torch.tensor(count, device=x.device)
        distributed.all_reduce(most, op=distributed.ReduceOp.MAX)
        count = int(most.item())
    if count < 2:
        return forward(x)
    weights = list(module.parameters())
    return tiled.apply(lambda _, part: forward(part), module, x, count, weights)
