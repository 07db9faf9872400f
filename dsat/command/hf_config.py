"""The transformers configuration of `--model`, and a DeepSpeed configuration for the model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsat.command import document
from dsat.command import ds_config as configs
from dsat.errors import UserInputError

CONFIG_FILE, _SUFFIX = "config.json", ".json"
_PRECISIONS = ("bf16", "fp16")


def find(model: str) -> Path:
    """Find the configuration file of a model.

    Args:
        model: a file, a folder with a config.json, or the id of a model on the Hugging Face Hub
            (its config.json comes from the local cache or is downloaded).

    Raises:
        UserInputError: there is no valid configuration, or the model is quantized.
    """
    path = Path(os.path.expanduser(model))  # leaves an unknown ~user unchanged
    if path.is_dir():
        path /= CONFIG_FILE
        if not path.is_file():
            raise UserInputError(f"the folder has no {CONFIG_FILE}", where=f"--model {model}")
    path = path if path.is_file() else _find_on_hub(model)
    config = _read(path)
    if "model_type" not in config:
        raise UserInputError(
            'is not the configuration of a transformers model: "model_type" is missing',
            where=str(path),
        )
    if config.get("quantization_config"):
        raise UserInputError(
            "the memory of a quantized model cannot be predicted",
            where=f"{path}: quantization_config",
            hint="Remove the section to predict the model without quantization.",
        )
    return path.absolute()  # not resolved: a cached file links to one named by its hash


def type_of(path: Path) -> str:
    """Return the type of a model, such as `llama`, from its configuration."""
    return str(_read(path)["model_type"])


def _read(path: Path) -> dict[str, Any]:
    """Read a configuration as transformers does, which accepts `Infinity` and duplicate keys."""
    try:
        config = json.loads(document.read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserInputError(f"is not valid JSON: {error}", where=str(path)) from None
    if not isinstance(config, dict):
        raise UserInputError("is not a mapping of keys to values", where=str(path))
    return config


def _find_on_hub(model: str) -> Path:
    """Return the config.json of a model on the Hub, from the local cache or the network."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    where = f"--model {model}"
    not_found = UserInputError("there is no such file or folder", where=where)
    if model.endswith(_SUFFIX):
        raise not_found
    try:
        cached = try_to_load_from_cache(model, CONFIG_FILE)
        return Path(cached if isinstance(cached, str) else hf_hub_download(model, CONFIG_FILE))
    except HFValidationError:  # the text is a path, not an id
        raise not_found from None
    except LocalEntryNotFoundError:
        raise UserInputError(
            "is not a file or folder, and the Hugging Face Hub is offline or cannot be reached",
            where=where,
            hint="Give the path of a config.json.",
        ) from None
    except OSError as error:  # includes errors of the Hub and the network
        reason = str(error).strip().partition("\n")[0]
        raise UserInputError(
            f"is not a file or folder, and the Hugging Face Hub has no config.json for it: "
            f"{reason}",
            where=where,
            hint="Give the path of a config.json, or run `hf auth login` if the model is gated.",
        ) from None


def ds_config(dtype: str | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the user's DeepSpeed configuration with usual values, and drop its scheduler.

    Usual values replace "auto". Other "auto" settings are dropped, except for sizes that
    `fill_in_sizes` computes later.

    Args:
        dtype: type of the parameters (bf16, fp16 or fp32). None means the type in the user's
            configuration: bf16 if its bf16 and fp16 are both "auto", and fp32 without either.

    Raises:
        UserInputError: `dtype` contradicts the user's configuration.
    """
    dtype_of_config, _ = configs.data_types(config)
    differs = dtype_of_config in _PRECISIONS and dtype_of_config != dtype
    if dtype is not None and (differs or configs.at(config, f"{dtype}.enabled") is False):
        raise UserInputError(
            "contradicts the precision in --ds-config",
            where=f"--dtype {dtype}",
            hint="Make both the same, or remove --dtype.",
        )
    auto = [name for name in _PRECISIONS if configs.at(config, f"{name}.enabled") == configs.AUTO]
    precision = dtype or dtype_of_config or (auto or _PRECISIONS)[0]
    usual: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        **{name: {"enabled": name == precision} for name in _PRECISIONS},
    }
    total, *sizes = configs.BATCH_KEYS
    if not isinstance(config.get(total), int):  # else the global batch implies the other sizes
        usual |= dict.fromkeys(sizes, 1)
    merged = configs.merge(usual, configs.fill_in_auto(config, usual))
    merged.pop("scheduler", None)  # takes no memory, but would need the training's length
    return _drop_auto(merged)


def _drop_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop "auto" values, so that DeepSpeed's defaults apply; keep the keys of `BY_HIDDEN_SIZE`."""
    return {
        key: _drop_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != configs.AUTO or key in configs.BY_HIDDEN_SIZE
    }


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the parameter type of a complete configuration (bf16, fp16 or fp32)."""
    return next((name for name in _PRECISIONS if config[name]["enabled"] is True), "fp32")
