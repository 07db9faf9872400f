"""What a script is made of besides its tensors, for the key of a cache: code and settings.

Two models with the same parameters need different memory if their forward passes differ: by the
user's own code, by switches that are no parameters (`F.scaled_dot_product_attention` or not), by
the version of the library that they come from.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_LIBRARIES = ("transformers", "peft", "accelerate", "diffusers", "timm", "torchvision")
# Their versions are in the key already, and an editable install lies outside of site-packages.
_NOT_THE_USERS = ("dsat", "deepspeed", "torch", "determined")
_INSTALLED = ("site-packages", "dist-packages")
_DEEPEST = 4  # of configurations in configurations


def of_script(modules: Iterable[object]) -> dict[str, Any]:
    """The code and settings of this process's script, as JSON.

    Args:
        modules: of the model, all of them.
    """
    return {
        "sources": _digest(user_sources(sys.modules)),
        "settings": _digest(settings_of(modules)),
        # Paths differ from run to run, that of the configuration among them.
        "arguments": [word for word in sys.argv[1:] if os.sep not in word],
        "versions": {
            name: getattr(sys.modules[name], "__version__", "")
            for name in _LIBRARIES
            if name in sys.modules
        },
    }


def user_sources(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Digests of the user's own source files, by the name of the module.

    Args:
        modules: as `sys.modules` has them, "__main__" among them.
    """
    found = {}
    for name, module in list(modules.items()):
        # Lazy modules import something when asked for an attribute that they have not got.
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and _is_users(name, Path(file)):
            found[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return found


def _is_users(name: str, file: Path) -> bool:
    if name.split(".")[0] in _NOT_THE_USERS or file.suffix != ".py":
        return False
    if any(part in _INSTALLED for part in file.parts):
        return False
    library = Path(sysconfig.get_path("stdlib")).resolve()
    return file.is_file() and library not in file.resolve().parents


def settings_of(modules: Iterable[object]) -> list[Any]:
    """Plain public attributes of each module, then what its configurations say, each of them once.

    A configuration is whatever a module has as `config`. All of its attributes count: Hugging Face
    keeps the choice of attention in a private one, and leaves it out of `to_dict()`.
    """
    attributes, configs = [], {}
    for module in modules:
        own = vars(module)
        attributes.append({k: v for k, v in own.items() if k[:1] != "_" and _is_plain(v)})
        config = own.get("config")
        if config is not None:
            configs[id(config)] = config
    return [attributes, [_as_json(config, _DEEPEST) for config in configs.values()]]


def _as_json(value: Any, depth: int) -> Any:
    """Plain values and containers as they are, objects by their attributes; others by type."""
    if _is_plain(value):
        return value
    if depth and isinstance(value, Mapping):
        return {str(key): _as_json(part, depth - 1) for key, part in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [_as_json(part, depth - 1) for part in value]
    if depth and not isinstance(value, type) and hasattr(value, "__dict__"):
        return _as_json(vars(value), depth - 1)
    return type(value).__qualname__


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
