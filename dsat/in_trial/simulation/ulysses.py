"""Ulysses sequence parallelism in a simulation, for scripts that run without it."""

from __future__ import annotations

from typing import Any

import torch

from dsat.in_trial.simulation.patches import SimulationUnsupported


def groups(module: torch.nn.Module, *, size: int, micro_batch: int) -> Any:
    """Divide the attention of a transformers model; return the `mpu` for `deepspeed.initialize`.

    Raises:
        SimulationUnsupported: the model's attention is not chosen by its configuration.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if attention is None:
        raise SimulationUnsupported("sequence parallelism of a model that is not of transformers")
    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    return UlyssesSPAttentionHF.register_with_transformers(
        module,
        core_attn_implementation=attention,
        sequence_parallel_size=size,
        micro_batch_size=micro_batch,
    )
