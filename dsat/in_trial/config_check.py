"""Validation of DeepSpeed configurations by the installed DeepSpeed itself.

    python3 -m dsat.in_trial.config_check QUESTIONS ANSWERS

The file QUESTIONS has `{"configs": [{"config": {...}, "whole": bool}], "defaults": [path, ...]}`.
The file ANSWERS gets DeepSpeed's version, the problems and ignored keys of each configuration, and
the default of each path. dsat has no list of settings. DeepSpeed's pydantic models refuse unknown
keys and wrong types. For sections without a model, dsat records which keys DeepSpeed looks up.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import json
import logging
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsat.command.ds_config import AUTO, did_you_mean
from dsat.values.files import write_atomically
from dsat.values.parallelism import SEQUENCE_SIZE, TENSOR_SIZE

_BATCH: Mapping[str, Any] = {"train_batch_size": 1}
_BY_HAND = ("value_error", "assertion_error")  # pydantic's error types of hand-written validators
_SLIP = 0.85  # least similarity at which an ignored key counts as a typing error
_MOST_CHARACTERS = 300


@dataclass(frozen=True)
class Problem:
    """A setting that DeepSpeed does not accept.

    Attributes:
        path: dotted path; empty for the whole configuration.
    """

    path: str
    message: str
    hint: str = ""


@dataclass
class Verdict:
    """Problems of a configuration, and its ignored keys.

    Attributes:
        ignored: each ignored key, with the key that the user may have meant (empty if unknown).
    """

    problems: list[Problem] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)


class _Section(dict[str, Any]):
    """Mapping that records which keys are read.

    Attributes:
        defaults: the keys that were read, with the reader's default; None if it had none.
        is_open: whether a reader iterated over all keys, as pydantic models do.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        parts = {k: _Section(v) if isinstance(v, Mapping) else v for k, v in content.items()}
        super().__init__(parts)
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
        return self  # so that `key in section.keys()` is recorded

    def __iter__(self) -> Iterator[str]:
        self.is_open = True
        return super().__iter__()

    def items(self) -> Any:
        self.is_open = True
        return super().items()

    def values(self) -> Any:
        self.is_open = True
        return super().values()

    def __copy__(self) -> _Section:
        return self


def check(config: Mapping[str, Any], *, whole: bool, version: str) -> Verdict:
    """Check a configuration with DeepSpeed itself; "auto" counts as unset.

    Each key is parsed alone, to locate problems. If there are none and the configuration is whole,
    all keys are then parsed together.
    """
    verdict = Verdict()
    content = _drop_auto(config)
    refusals: dict[str, str] = {}  # by DeepSpeed's message, the key that it refuses even alone
    for key, value in content.items():
        section, error = _read({key: value})
        if error is not None and _is_of_model(error):
            verdict.problems += _problems_of_model(key, error, version)
        elif error is not None and not isinstance(value, Mapping) and _read({key: {}})[1] is None:
            verdict.problems.append(Problem(key, f"must be a mapping, not {json.dumps(value)}"))
        elif error is not None:
            refusals[_text(error)] = key
        else:
            slips = list(_slips(section, [key], "", version))
            verdict.problems += slips
            if slips:
                continue
        if error is None and key not in (*section.defaults, SEQUENCE_SIZE):
            verdict.ignored[key] = did_you_mean(key, section.defaults)
    if whole and not verdict.problems:
        error = _read(content)[1]
        if error is not None:
            text = _text(error)
            place, reason = refusals.get(text, ""), text.removesuffix(".")
            hint = ""
            if place and "removed" in text:
                place = _find_removed(content, place, text)
                hint = f"Deleting {place!r} is enough."
            verdict.problems.append(
                Problem(place, f"DeepSpeed {version} refuses it: {reason}", hint)
            )
    return verdict


def _find_removed(config: Mapping[str, Any], key: str, text: str) -> str:
    """Return the path of the setting that causes an error; `key` if no single one below it does."""
    value = config[key]
    for inner in value if isinstance(value, Mapping) else ():
        error = _read({key: {name: part for name, part in value.items() if name != inner}})[1]
        if error is None or _text(error) != text:
            return f"{key}.{inner}"
    return key


def default(path: str) -> Any:
    """Return a setting's default if it is a bool, number or string, else None.

    Raises:
        KeyError: this DeepSpeed does not have the setting.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    top, _, rest = path.partition(".")
    if path in (TENSOR_SIZE, SEQUENCE_SIZE):
        return _default_parallelism(path)
    if top == "zero_optimization":
        *sections, key = rest.split(".")
        value = _field(_model_at(DeepSpeedZeroConfig, sections), key).get_default()
    else:
        whole: Any = _read({top: {"dsat asks": 0}})[0]
        value = whole[top].defaults[rest] if rest else whole.defaults[top]
    value = value.value if isinstance(value, enum.Enum) else value
    return value if isinstance(value, (bool, int, float, str)) else None


def _default_parallelism(path: str) -> int:
    """Return 1, the default size; raise KeyError if this DeepSpeed lacks the parallelism."""
    package = "sequence_parallel" if path == SEQUENCE_SIZE else "tensor_parallel"
    if importlib.util.find_spec(f"deepspeed.runtime.{package}") is None:
        raise KeyError(path)
    return 1


def _read(config: Mapping[str, Any]) -> tuple[_Section, Exception | None]:
    """Let DeepSpeed parse a configuration; return it with a record of read keys, and any error."""
    from deepspeed.runtime.config import DeepSpeedConfig

    section = _Section({**config, **_BATCH})
    try:
        DeepSpeedConfig(section)
    except Exception as error:  # each reader objects in its own way
        return section, error
    return section, None


def _is_of_model(error: Exception) -> bool:
    """Return whether a pydantic model refused a key or a type, not a combination of settings."""
    from pydantic import ValidationError

    return isinstance(error, ValidationError) and error.errors()[0]["type"] not in _BY_HAND


def _problems_of_model(key: str, refusal: Any, version: str) -> Iterator[Problem]:
    for error in refusal.errors():
        path = [str(part) for part in error["loc"]]
        path = path if path[:1] == [key] else [key, *path]
        if error["type"] == "extra_forbidden":
            near = did_you_mean(path[-1], _names(refusal.title, error["loc"][:-1]))
            yield Problem(".".join(path), f"DeepSpeed {version} has no setting {path[-1]!r}", near)
        elif error["type"] not in _BY_HAND:
            requirement = error["msg"].partition(", unable")[0].removeprefix("Input should be ")
            yield Problem(".".join(path), f"must be {requirement}, not {error['input']!r}")


def _slips(section: _Section, keys: Iterable[str], path: str, version: str) -> Iterator[Problem]:
    """Yield a problem for each ignored key that resembles one that DeepSpeed reads."""
    for key in keys:
        value = dict.get(section, key)
        if key in section.defaults:
            if isinstance(value, _Section):
                yield from _slips(value, dict.keys(value), f"{path}{key}.", version)
            continue
        near = "" if section.is_open else did_you_mean(key, section.defaults, likeness=_SLIP)
        if near:
            yield Problem(path + key, f"DeepSpeed {version} reads no setting {key!r}", near)


def _names(title: str, path: Iterable[Any]) -> list[str]:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models = _subclasses(DeepSpeedConfigModel)
    model = _model_at(next((m for m in models if m.__name__ == title), None), path)
    fields = {} if model is None else model.model_fields
    return [name for key, info in fields.items() for name in (key, info.alias or key)]


def _model_at(model: Any, path: Iterable[Any]) -> Any:
    for key in path:
        annotation = _field(model, str(key)).annotation
        kinds = [annotation, *typing.get_args(annotation)]
        model = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return model


def _field(model: Any, name: str) -> Any:
    """Return a model's field by its name or alias; raise KeyError if there is none."""
    for key, model_field in ({} if model is None else model.model_fields).items():
        if name in (key, model_field.alias):
            return model_field
    raise KeyError(name)


def _subclasses(cls: Any) -> Iterator[Any]:
    for inner in cls.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _drop_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _drop_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != AUTO
    }


def _text(error: Exception) -> str:
    """Return an error as one line of at most 300 characters."""
    from pydantic import ValidationError

    text = str(error) or type(error).__name__
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        text = f"{place}: {first['msg']}" if place else first["msg"]
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


def main() -> None:
    """Read questions from the first file, and write the answers to the second."""
    logging.disable(logging.WARNING)
    questions, answers = map(Path, sys.argv[1:3])
    task = json.loads(questions.read_text(encoding="utf-8"))
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print
        import deepspeed

        version = deepspeed.__version__
        verdicts = [check(c["config"], whole=c["whole"], version=version) for c in task["configs"]]
        defaults = {}
        for path in task["defaults"]:
            with contextlib.suppress(KeyError):
                defaults[path] = default(path)
    result = {"version": version, "verdicts": [asdict(v) for v in verdicts], "defaults": defaults}
    write_atomically(answers, json.dumps(result))


if __name__ == "__main__":
    main()
