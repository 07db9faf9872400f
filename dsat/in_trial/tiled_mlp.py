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

_MOST_SIMULATED = 16  # parts: more take minutes, and are a sixteenth of an MLP's states smaller


def tile(model: torch.nn.Module) -> bool:
    """Have each MLP of a model compute in parts; return False if there is none."""
    found = [module for module in model.modules() if is_mlp(module)]
    for module in found:
        vars(module)["forward"] = functools.partial(_in_parts, module, module.forward)
    return bool(found)


def is_mlp(module: torch.nn.Module) -> bool:
    """Tell an MLP by the name of its class, as all models of transformers have it."""
    return type(module).__name__.endswith("MLP")


def _in_parts(
    module: torch.nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

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
    return TiledMLP.apply(lambda _, part: forward(part), module, x, count, weights)
