"""Environment variables by which `accelerate launch` passes a DeepSpeed configuration to a script.

Sources: accelerate 1.15 (utils/launch.py, `DeepSpeedPlugin` in utils/dataclasses.py). With a
configuration file, the plugin refuses other settings only if `ACCELERATE_CONFIG_DS_FIELDS` lists
them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from dsat.values import parallelism

_USES_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
CONFIG_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_GAS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
# Variables for settings that the configuration file contains.
_IN_THE_FILE = ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_GRADIENT_CLIPPING")
_ZERO3_INIT = "ACCELERATE_DEEPSPEED_ZERO3_INIT"
_IN_THE_FILE_PREFIX = "ACCELERATE_DEEPSPEED_OFFLOAD_"

_PARALLEL = "PARALLELISM_CONFIG_"
_USES_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"


def uses_deepspeed(env: Mapping[str, str]) -> bool:
    """Return whether accelerate passes a DeepSpeed configuration to the script."""
    return env.get(_USES_DEEPSPEED, "false").lower() in ("true", "1", "yes")


def use_config(env: Mapping[str, str], path: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return a copy of `env` that makes accelerate pass the configuration file at `path`.

    The copy is unchanged if accelerate does not use DeepSpeed.
    """
    if not uses_deepspeed(env):
        return dict(env)
    kept = {
        name: value
        for name, value in env.items()
        if name not in _IN_THE_FILE and not name.startswith(_IN_THE_FILE_PREFIX)
    }
    if importlib.util.find_spec("transformers") is not None:  # the variable needs transformers
        kept.pop(_ZERO3_INIT, None)  # without it, the stage in the file decides
    found = {**kept, CONFIG_FILE: path, "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file"}
    gas = config.get("gradient_accumulation_steps")
    if isinstance(gas, int):
        found[_GAS] = str(gas)
    return found


def make_parallelism_variables(
    env: Mapping[str, str], config: Mapping[str, Any], slots: int
) -> dict[str, str]:
    """Return variables that set, or disable, the sequence parallelism of accelerate 1.12 and newer.

    A Trainer whose arguments have a `parallelism_config` ignores them.
    """
    shared = parallelism.of_config(config)
    if shared.sequence == 1:
        return {_USES_PARALLELISM: "false"} if _USES_PARALLELISM in env else {}
    attention = f"{_PARALLEL}SP_ATTN_IMPLEMENTATION"  # accelerate has no default for it
    return {
        attention: env.get(attention, "sdpa"),
        _USES_PARALLELISM: "true",
        f"{_PARALLEL}SP_BACKEND": "deepspeed",
        f"{_PARALLEL}SP_SIZE": str(shared.sequence),
        f"{_PARALLEL}DP_SHARD_SIZE": str(shared.data(slots)),
    }
