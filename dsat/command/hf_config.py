"""A model that is known by its transformers configuration alone: no script, no weights."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsat.command import ds_config as configs
from dsat.command.experiment import read_mapping
from dsat.errors import UserInputError

CONFIG_FILE = "config.json"
_PRECISIONS = ("bf16", "fp16")
# "auto" settings of `zero_optimization` that the Trainer computes from the hidden size, and how
# (integrations/deepspeed.py of transformers 5.23).
_BY_HIDDEN_SIZE: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def find(given: str) -> Path:
    """Find the configuration file that a user names; downloads nothing.

    Args:
        given: a file, a folder with a config.json, or the name of a model in the local cache of
            the Hugging Face hub.

    Raises:
        UserInputError: there is none, or it is no configuration of a model that can be predicted.
    """
    path = Path(os.path.expanduser(given))  # which leaves an unknown ~user as it is
    if path.is_dir():
        path = path / CONFIG_FILE
    if not path.is_file():
        path = _cached(given) or path
    if not path.is_file():
        raise UserInputError(
            "there is no such file or folder, and no copy of a model of this name in the local "
            "Hugging Face cache",
            where=f"--hf-config {given}",
            hint="Nothing is downloaded here: give the path of the model's config.json.",
        )
    config = read_mapping(path)
    if "model_type" not in config:
        raise UserInputError(
            'is no configuration of a transformers model: "model_type" is missing', where=str(path)
        )
    if config.get("quantization_config"):
        raise UserInputError(
            "is of a quantized model, whose memory cannot be predicted",
            where=f"{path}: quantization_config",
            hint="Take the section out for the memory of the same model without quantization.",
        )
    return path.absolute()  # a file of the cache is a link to one without a name


def ds_config(dtype: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's DeepSpeed configuration, completed by usual values.

    Args:
        dtype: of the parameters (bf16, fp16 or fp32), unless the user's configuration enables one.
        given: the user's; its "auto" values become the usual ones, as a Trainer fills them in,
            but those of `with_buckets`.
    """
    enabled = [name for name in _PRECISIONS if (given.get(name) or {}).get("enabled") is True]
    usual: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **{name: {"enabled": name in (enabled or [dtype])} for name in _PRECISIONS},
    }
    total, *sizes = configs.BATCH_KEYS
    if not isinstance(given.get(total), int):  # from which the others would follow
        usual |= dict.fromkeys(sizes, 1)
    merged = configs.merge(usual, configs.completed(given, usual))
    merged.pop("scheduler", None)  # which takes no memory, and must know the training's length
    return _without_auto(merged)


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in which DeepSpeed's own defaults take the place of "auto"."""
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != configs.AUTO or key in _BY_HIDDEN_SIZE
    }


def with_buckets(config: Mapping[str, Any], hidden_size: int | None) -> dict[str, Any]:
    """Return a configuration whose "auto" sizes are those that a Trainer computes for a model.

    Args:
        hidden_size: of the model; None leaves them to DeepSpeed's defaults.
    """
    sizes = {} if hidden_size is None else {k: f(hidden_size) for k, f in _BY_HIDDEN_SIZE.items()}
    return configs.completed(config, {"zero_optimization": sizes})


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the type of parameters that a complete configuration trains (bf16, fp16 or fp32)."""
    return next((name for name in _PRECISIONS if config[name]["enabled"] is True), "fp32")


def missing_packages() -> list[str]:
    """Return the packages that are missing for a simulation of the model."""
    names = ("torch", "deepspeed", "transformers")
    return [name for name in names if importlib.util.find_spec(name) is None]


def _cached(name: str) -> Path | None:
    if importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, CONFIG_FILE)
    except HFValidationError:  # it is the path of a file
        return None
    return Path(found) if isinstance(found, str) else None
