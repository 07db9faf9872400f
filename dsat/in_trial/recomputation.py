"""Activation checkpointing in models of transformers, diffusers and timm: switching and reading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsat.command.switches import checkpointing

# Methods that turn a model's checkpointing on and off: in transformers (since version 5.20, and
# before), diffusers and timm.
_METHODS: tuple[tuple[str, str, dict[str, bool]], ...] = (
    ("activation_checkpointing_enable", "activation_checkpointing_disable", {}),
    ("gradient_checkpointing_enable", "gradient_checkpointing_disable", {}),
    ("enable_gradient_checkpointing", "disable_gradient_checkpointing", {}),
    ("set_grad_checkpointing", "set_grad_checkpointing", {"enable": False}),
)
# Class attributes in transformers and diffusers that are false if these methods fail.
_SUPPORTED = ("supports_gradient_checkpointing", "_supports_gradient_checkpointing")


# Properties in transformers and diffusers that are true while checkpointing is on.
_IS_ON = ("is_activation_checkpointing", "is_gradient_checkpointing")


def switch(model: Any, value: bool | str) -> bool:
    """Turn activation checkpointing on or off; return False if the model has no method for it."""
    part_ids: set[int] = set()
    for module, (enable, disable, off_args) in _find_switches(model):
        if id(module) in part_ids:  # set together with the module that contains it
            continue
        part_ids.update(id(part) for part in module.modules())
        if value is False:
            getattr(module, disable)(**off_args)
        else:
            getattr(module, enable)(**_options(enable, value))
            _keep_gradients_flowing(module)
    return bool(part_ids)


def is_on(model: Any) -> bool | None:
    """Return whether a model recomputes activations; None if unknown."""
    for module, _ in _find_switches(model):
        values = (getattr(module, name, None) for name in _IS_ON)  # the old name warns
        return next((value for value in values if isinstance(value, bool)), None)
    return None


def _options(enable: str, value: bool | str) -> dict[str, Any]:
    if isinstance(value, bool):
        return {}
    options = checkpointing(value)
    if "use_reentrant" in options:
        return {f"{enable.removesuffix('_enable')}_kwargs": options}
    return options


def _find_switches(model: Any) -> Iterator[tuple[Any, tuple[str, str, dict[str, bool]]]]:
    for module in model.modules():  # containers before their parts
        methods = next((m for m in _METHODS if callable(getattr(module, m[0], None))), None)
        if methods is not None and all(getattr(module, name, True) for name in _SUPPORTED):
            yield module, methods


def _keep_gradients_flowing(module: Any) -> None:
    """Make outputs of frozen embeddings require gradients, as transformers does for LoRA.

    Otherwise checkpointed layers pass on no gradient, because no input requires one.
    """
    enable = getattr(module, "enable_input_require_grads", None)
    is_frozen = not all(parameter.requires_grad for parameter in module.parameters())
    if is_frozen and callable(enable):
        enable()
