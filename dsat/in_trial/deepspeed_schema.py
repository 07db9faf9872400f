"""What the installed DeepSpeed accepts as a configuration, asked of DeepSpeed itself.

    python3 -m dsat.in_trial.deepspeed_schema FILE

writes a JSON Schema into a file: the settings of DeepSpeed's own configuration models (pydantic),
with their types, bounds and defaults, and the keys that its other readers ask a section for, with
the defaults that they take. None of it is a list of ours: each section is read once with a key that
no DeepSpeed has. A model refuses it and so tells which one it is; whatever else reads the section
leaves behind what it asked for.

Beyond JSON Schema: `plain`: nothing is converted to the type, as models do; `open`: other keys are
handed on; `removed`: the reason why this DeepSpeed refuses the setting; `names`: the values that
there are, and `any_case`: those of which the case of letters does not count.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import importlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from dsat.inputs.ds_config import AUTO, TOP_LEVEL_KEYS

_NOBODYS = "dsat asks"
_BATCH: Mapping[str, Any] = {"train_batch_size": 1}
_DEEPEST = 3  # sections in sections


class _Asked(dict[str, Any]):
    """A section that remembers what it was asked for.

    Attributes:
        defaults: by key, what the asker takes if it is not there; None if that is not known.
        is_open: somebody took all of its keys, whatever they are called.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.defaults: dict[str, Any] = {}
        self.is_open = False

    def get(self, key: str, default: Any = None) -> Any:
        self.defaults[key] = default
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.defaults.setdefault(key, None)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.defaults.setdefault(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # in which somebody looks for a key

    def __iter__(self) -> Iterator[str]:
        self.is_open = True
        return super().__iter__()

    def items(self) -> Any:
        self.is_open = True
        return super().items()

    def values(self) -> Any:
        self.is_open = True
        return super().values()

    def __copy__(self) -> _Asked:
        return self


def schema() -> dict[str, Any]:
    """The JSON Schema of a whole configuration."""
    config: Any = importlib.import_module("deepspeed.runtime.config")
    found = _section((), dict(_BATCH))
    # What other parts of DeepSpeed read is known by our own list alone.
    for key in TOP_LEVEL_KEYS:
        found["properties"].setdefault(key, {})
    for key, message in getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}).items():
        found["properties"][key] = {"removed": message}
    zero = found["properties"].get("zero_optimization", {}).get("properties", {})
    for key, message in getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", {}).items():
        zero[key] = {"removed": message}
    _name_classes(found["properties"], config)
    return found


def _section(path: tuple[str, ...], content: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a section: the one at the end of a path, or the whole.

    Args:
        content: that DeepSpeed reads it with.
    """
    asked = _Asked(content)
    model = _read(path, asked)
    if model is not None:
        return model
    properties = {key: _of_default(value) for key, value in sorted(asked.defaults.items())}
    for key in asked.defaults if len(path) < _DEEPEST else ():
        if key not in content and not properties[key].get("type"):
            inner = _section((*path, key), {_NOBODYS: 0})
            if inner.get("properties"):
                properties[key] = inner
    properties.pop(_NOBODYS, None)
    found = {"type": "object", "properties": properties, "additionalProperties": True}
    return {**found, "open": True} if asked.is_open else found


def _read(path: tuple[str, ...], section: _Asked) -> dict[str, Any] | None:
    """Has DeepSpeed read a configuration with a section; the model that refuses it, if one does."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    whole: Any = section
    for key in reversed(path):
        whole = {key: whole}
    if path:
        whole = {**_BATCH, **whole}
    try:
        DeepSpeedConfig(whole)
    except ValidationError as error:
        for problem in error.errors():
            if problem["type"] == "extra_forbidden" and problem["loc"][-1] == _NOBODYS:
                return _of_model(error.title, [str(part) for part in problem["loc"][:-1]])
    except Exception as error:  # readers fail in their own ways where a value is none of theirs
        logging.getLogger(__name__).debug("%s: %s", ".".join(path), error)
    return None


def _of_default(default: Any) -> dict[str, Any]:
    """What a reader that takes this default, and converts nothing, can do with."""
    kinds = {bool: "boolean", int: "number", float: "number", str: "string"}
    kind = kinds.get(type(default))
    if kind is None or default == AUTO:  # which stands for any type
        return {}
    return {"type": [kind, "null"], "default": default, "plain": True}


def _of_model(title: str, path: list[str]) -> dict[str, Any] | None:
    """The schema of a configuration model by its name, or of one inside it; None if it is not
    known."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    classes = {cls.__name__: cls for cls in _subclasses(DeepSpeedConfigModel)}
    if title not in classes:
        return None
    found = _of_class(classes[title], classes)
    for key in path:
        found = found["properties"][key]
    return found


def _of_class(cls: Any, classes: Mapping[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        found = _of_field(field, classes)
        if found and _takes_null(cls, name):  # a validator may, whatever the type says
            found = {"anyOf": [found, {"type": "null"}]}
        found = {**found, "default": _as_json(field.get_default())}
        properties |= dict.fromkeys((name, field.alias or name), found)
    strict = cls.model_config.get("extra") == "forbid"
    return {"type": "object", "properties": properties, "additionalProperties": not strict}


def _takes_null(cls: Any, name: str) -> bool:
    from pydantic import ValidationError

    try:
        cls(**{name: None})
    except ValidationError:
        return False
    except Exception as error:  # of a validator that is written by hand
        logging.getLogger(__name__).debug("%s.%s: %s", cls.__name__, name, error)
        return False
    return True


def _of_field(field: Any, classes: Mapping[str, Any]) -> dict[str, Any]:
    from pydantic import TypeAdapter

    kind: Any = field.annotation
    for constraint in field.metadata:
        kind = Annotated[kind, constraint]
    try:
        whole = TypeAdapter(kind).json_schema()
    except Exception as error:  # of a type that JSON has not got: a torch.dtype, a process group
        logging.getLogger(__name__).debug("%s: %s", kind, error)
        return {}
    definitions = whole.pop("$defs", {})

    def resolved(part: Any) -> Any:
        if isinstance(part, list):
            return [resolved(value) for value in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return resolved(definitions[part["$ref"].rpartition("/")[2]])
        if "properties" in part and part.get("title") in classes:
            return _of_class(classes[part["title"]], classes)
        return {key: resolved(value) for key, value in part.items() if key != "description"}

    found: dict[str, Any] = resolved(whole)
    return found


def _as_json(value: Any) -> Any:
    """A default; None for what JSON has not got."""
    if isinstance(value, enum.Enum):
        value = value.value
    return value if isinstance(value, (bool, int, float, str)) else None


def _subclasses(cls: Any) -> Iterator[Any]:
    for inner in cls.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _name_classes(properties: dict[str, Any], config: Any) -> None:
    """The optimizers and schedulers that an engine can make (runtime/engine.py)."""
    import torch

    schedulers = importlib.import_module("deepspeed.runtime.lr_schedules")
    own = getattr(config, "DEEPSPEED_OPTIMIZERS", [])
    optimizers = {"names": _classes(torch.optim), "any_case": sorted(own)}
    names = {"names": sorted({*_classes(schedulers), *_classes(torch.optim.lr_scheduler)})}
    for key, known in (("optimizer", optimizers), ("scheduler", names)):
        section = copy.deepcopy(properties.get(key) or {})
        section.setdefault("properties", {})["type"] = {"type": ["string", "null"], **known}
        section["properties"].setdefault("params", {})
        properties[key] = {"type": "object", "additionalProperties": True, **section}


def _classes(module: Any) -> list[str]:
    return sorted(n for n, v in vars(module).items() if isinstance(v, type) and n[0] != "_")


def main() -> None:
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print what they like
        import deepspeed

        found = {"version": deepspeed.__version__, "schema": schema()}
    path = Path(sys.argv[1])
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(found, default=lambda _: None), encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    main()
