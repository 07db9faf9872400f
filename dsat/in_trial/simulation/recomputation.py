"""Activation checkpointing of a library's model, switched on or off from outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dsat.in_trial.simulation.patches import SimulationUnsupported

# Methods that switch a model's checkpointing on and off: of transformers (from version 5.20 on, and
# before), of diffusers, of timm.
_METHODS: tuple[tuple[str, str, dict[str, bool]], ...] = (
    ("activation_checkpointing_enable", "activation_checkpointing_disable", {}),
    ("gradient_checkpointing_enable", "gradient_checkpointing_disable", {}),
    ("enable_gradient_checkpointing", "disable_gradient_checkpointing", {}),
    ("set_grad_checkpointing", "set_grad_checkpointing", {"enable": False}),
)
# Attributes of classes of transformers or diffusers that are false where the method fails.
_SUPPORTED = ("supports_gradient_checkpointing", "_supports_gradient_checkpointing")


def switch(model: torch.nn.Module, wanted: bool) -> None:
    """Switch checkpointing as the script could have.

    Raises:
        SimulationUnsupported: the model has no switch.
    """
    inside: set[int] = set()
    for module, (enable, disable, off) in _switchable(model):
        if id(module) in inside:  # switched with the module that contains it
            continue
        inside.update(id(part) for part in module.modules())
        if wanted:
            getattr(module, enable)()
            _keep_gradients_flowing(module)
        else:
            getattr(module, disable)(**off)
    if not inside:
        raise SimulationUnsupported(
            "the model has no known switch for activation checkpointing (models of transformers, "
            "diffusers and timm have one)"
        )


def _switchable(
    model: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, tuple[str, str, dict[str, bool]]]]:
    for module in model.modules():  # containers before their parts
        methods = next((m for m in _METHODS if callable(getattr(module, m[0], None))), None)
        if methods is not None and all(getattr(module, name, True) for name in _SUPPORTED):
            yield module, methods


def _keep_gradients_flowing(module: Any) -> None:
    """Make outputs of frozen embeddings require gradients, as transformers does for LoRA.

    Checkpointed layers pass on no gradient where no input requires one.
    """
    enable = getattr(module, "enable_input_require_grads", None)
    frozen = not all(parameter.requires_grad for parameter in module.parameters())
    if frozen and callable(enable):
        enable()
