"""DeepSpeed's activation checkpointing, configured as a candidate says.

No engine does that: a script calls `deepspeed.checkpointing.configure` with the path of its
configuration, before there is a candidate. What it passed is remembered, and done once more.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

# The module's own settings, where they are in a configuration, and the argument that goes before
# it (deepspeed/runtime/activation_checkpointing/checkpointing.py, 0.19.8).
_SETTINGS = (
    ("PARTITION_ACTIVATIONS", "partition_activations", "partition_activations"),
    ("CONTIGUOUS_CHECKPOINTING", "contiguous_memory_optimization", "contiguous_checkpointing"),
    ("num_layers", "number_checkpoints", "num_checkpoints"),
    ("CPU_CHECKPOINT", "cpu_checkpointing", "checkpoint_in_cpu"),
    ("SYNCHRONIZE", "synchronize_checkpoint_boundary", "synchronize"),
    ("PROFILE_TIME", "profile", "profile"),
)
_given: dict[str, Any] = {}


def watch() -> None:
    """Remembers what the script passes; for the rest of the process."""
    module = _module()
    original = module.configure
    signature = inspect.signature(original)

    @functools.wraps(original)
    def configure(*args: Any, **kwargs: Any) -> None:
        _given.clear()
        _given.update(signature.bind(*args, **kwargs).arguments)
        original(*args, **kwargs)

    module.configure = configure


def configure_again(config: Mapping[str, Any]) -> None:
    """As if the script had passed this configuration, if it has passed one."""
    if _given.get("deepspeed_config") is None:
        return
    module = _module()
    section: Any = importlib.import_module("deepspeed.runtime.activation_checkpointing.config")
    found = section.DeepSpeedActivationCheckpointingConfig(dict(config))
    for name, key, argument in _SETTINGS:
        if _given.get(argument) is None:
            setattr(module, name, getattr(found, key))


def _module() -> Any:
    return importlib.import_module("deepspeed.runtime.activation_checkpointing.checkpointing")
