"""Activation checkpointing of a script's model, switched on or off from outside.

A model of a library has a method that switches it. One that calls `torch.utils.checkpoint` or
DeepSpeed's own function by itself can only be switched off: what it passes to them is then called
as if nothing were checkpointed. Scripts hold these functions under names of their own, so it is not
the functions that are replaced, but what they call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Methods that switch a model's checkpointing on and off: of transformers (from version 5.20 on, and
# before), of diffusers, of timm.
_METHODS: tuple[tuple[str, str, dict[str, bool]], ...] = (
    ("activation_checkpointing_enable", "activation_checkpointing_disable", {}),
    ("gradient_checkpointing_enable", "gradient_checkpointing_disable", {}),
    ("enable_gradient_checkpointing", "disable_gradient_checkpointing", {}),
    ("set_grad_checkpointing", "set_grad_checkpointing", {"enable": False}),
)
# Attributes that tell of a class of transformers or diffusers whether the method will do.
_SUPPORTED = ("supports_gradient_checkpointing", "_supports_gradient_checkpointing")
_GENERATOR = "_checkpoint_without_reentrant_generator"


class Recomputation:
    """Switch for recomputed activations, for the rest of the process.

    Args:
        wanted: whether they shall be.

    Attributes:
        is_used: whether any were, or would have been, were they not to be kept.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self.is_used = False

    def switch(self, model: torch.nn.Module) -> None:
        """Switches a model as its script could have, and whatever it calls by itself."""
        for module, (enable, disable, off) in _switchable(model):
            if self._wanted:
                getattr(module, enable)()
                _keep_gradients_flowing(module)
            else:
                getattr(module, disable)(**off)
        self._watch_torch()
        self._watch_deepspeed()

    def _watch_torch(self) -> None:
        module: Any = importlib.import_module("torch.utils.checkpoint")

        def direct(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return function(*args)

        module.CheckpointFunction = self._watched(module.CheckpointFunction, direct)
        for name in [name for name in vars(module) if name.startswith(_GENERATOR)]:
            setattr(module, name, self._watched_generator(getattr(module, name)))

    def _watch_deepspeed(self) -> None:
        name = "deepspeed.runtime.activation_checkpointing.checkpointing"
        module: Any = importlib.import_module(name)

        def direct(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
            outputs = function(*args)
            all_outputs += [outputs] if isinstance(outputs, torch.Tensor) else outputs
            return outputs

        module.CheckpointFunction = self._watched(module.CheckpointFunction, direct)

    def _watched(self, original: Any, direct: Callable[..., Any]) -> Any:
        """Stand-in for an autograd function; `direct` calls the recomputed function."""
        recomputation = self

        class Function:
            @staticmethod
            def apply(*args: Any) -> Any:
                recomputation.is_used = True
                return original.apply(*args) if recomputation._wanted else direct(*args)

        return Function

    def _watched_generator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.utils.checkpoint` runs the function itself, between two steps of a generator."""

        def nothing() -> Iterator[None]:
            yield

        def generator(*args: Any, **kwargs: Any) -> Any:
            self.is_used = True
            return original(*args, **kwargs) if self._wanted else nothing()

        return generator


def _switchable(
    model: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, tuple[str, str, dict[str, bool]]]]:
    """The outermost modules that have methods to switch checkpointing, and these."""
    inside: set[int] = set()
    for module in model.modules():  # what contains others comes before them
        if id(module) in inside:
            continue
        methods = next((m for m in _METHODS if callable(getattr(module, m[0], None))), None)
        if methods is not None and _is_supported(module):
            inside.update(id(part) for part in module.modules())
            yield module, methods


def _is_supported(module: torch.nn.Module) -> bool:
    return all(getattr(module, name, True) for name in _SUPPORTED)


def _keep_gradients_flowing(module: Any) -> None:
    """Make outputs of frozen embeddings require gradients, as transformers does for LoRA.

    Checkpointed layers pass on no gradient where no input requires one.
    """
    enable = getattr(module, "enable_input_require_grads", None)
    frozen = not all(parameter.requires_grad for parameter in module.parameters())
    if frozen and callable(enable):
        enable()
