"""Injection of a trial's configuration into the script's calls of `deepspeed.initialize`.

Many scripts build their configuration in code, or read a file that no argument names. The
configuration that the script passes is kept if it agrees with the trial: for example, if it is the
trial's file, completed by the Hugging Face libraries. Otherwise it is replaced, unless it belongs
to another model (see `install`). The arguments have the names of deepspeed 0.14 to 0.19.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.command import ds_config
from dsat.in_trial.adapters.trial import TRIAL

_BY_ARGUMENT = ("config", "config_params")
_BY_ATTRIBUTE = "deepspeed_config"
SEVERAL_ENGINES = (
    "the script trains several engines. Throughput and latency cover the whole training loop, and "
    "all other figures only the first engine. Trials do not change an engine with a configuration "
    "of its own, except for batch sizes that equal those of the first engine"
)


@dataclass(frozen=True)
class Passed:
    """The configuration in a call of `deepspeed.initialize`.

    Attributes:
        name: the argument that holds it, or the attribute of the argument `args`.
        content: the script's own dict if it passes a dict, else the content of its file.
    """

    name: str
    content: dict[str, Any]


def install(config: Mapping[str, Any], overrides: Mapping[str, Any], path: Path) -> None:
    """Make engines that train use a trial's configuration; `path` is the file that holds it.

    A configuration that has all `overrides` is kept. Only the first engine's model is tuned, so a
    later engine with a different configuration keeps it. If its batch sizes equal the first
    engine's, only these become the trial's, because the script feeds both engines alike.
    """
    first: list[dict[str, Any]] = []

    def inject(arguments: dict[str, Any]) -> None:
        original = trained_config(arguments)
        if original is None:
            return
        if not first and _names_what_to_train(arguments):
            first.append(dict(original.content))
        if agrees(original.content, overrides):
            return
        if not first or original.content == first[0]:
            replace(arguments, original, config, path)
        elif original.name in _BY_ARGUMENT and _batch(original.content) == _batch(first[0]):
            user = {k: v for k, v in original.content.items() if k not in ds_config.BATCH_KEYS}
            replace(arguments, original, {**user, **_batch(config)}, path)

    TRIAL.calls.before_engine.append(inject)


def replace(
    arguments: dict[str, Any], original: Passed, config: Mapping[str, Any], path: Path
) -> None:
    """Replace the configuration that a call passes with the trial's.

    The trial's "auto" values are filled in from the replaced configuration, unless that is the file
    named by `args.deepspeed_config`.
    """
    if original.name == _BY_ATTRIBUTE:
        arguments["args"].deepspeed_config = str(path)
        return
    content = ds_config.fill_in_auto(config, original.content)
    # In place: the script may still read its batch size from there.
    original.content.clear()
    original.content.update(content)
    arguments[original.name] = original.content


def agrees(config: Mapping[str, Any], overrides: Mapping[str, Any], *, but_for: Any = None) -> bool:
    """Return whether a configuration has every setting of `overrides`, section by section.

    A value equal to `but_for`, such as "auto", agrees with any value; so does None in `overrides`.
    """
    for key, override in overrides.items():
        value = config.get(key)
        if isinstance(override, Mapping) and isinstance(value, Mapping):
            if not agrees(value, override, but_for=but_for):
                return False
        elif override not in (None, value) and (value is None or value != but_for):
            return False
    return True


def passed_config(arguments: Mapping[str, Any]) -> Passed | None:
    """Return the configuration in the arguments of `deepspeed.initialize`.

    None if there is none, if it is unreadable, or if `args` has a second one (DeepSpeed refuses
    that).
    """
    # DeepSpeed uses `config` and ignores `config_params` beside it.
    pairs = [(name, arguments[name]) for name in _BY_ARGUMENT if arguments.get(name) is not None]
    args_value = getattr(arguments.get("args"), _BY_ATTRIBUTE, None)
    if bool(pairs) == (args_value is not None):
        return None
    name, value = pairs[0] if pairs else (_BY_ATTRIBUTE, args_value)
    content = read_config(value)
    return None if content is None else Passed(name, content)


def drop_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `deepspeed.initialize` without a configuration.

    The script's `args` object is not changed, but DeepSpeed can still set attributes on it.
    """
    result = {name: value for name, value in arguments.items() if name not in _BY_ARGUMENT}
    if getattr(result.get("args"), _BY_ATTRIBUTE, None) is not None:
        result["args"] = _WithoutConfig(result["args"])
    return result


class _WithoutConfig:
    """View of a script's `args` without the configuration; attributes are set on the original."""

    def __init__(self, args: Any) -> None:
        self.__dict__.update({"_args": args, _BY_ATTRIBUTE: None})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._args, name, value)


def shared_sequences(arguments: Mapping[str, Any]) -> int:
    """Return how many ranks share a sequence, from the `mpu` or `mesh_param` that is passed."""
    mpu: Any = arguments.get("mpu")
    mesh = arguments.get("mesh_param")  # data-parallel and sequence-parallel size
    if hasattr(mpu, "get_sequence_parallel_world_size"):
        return int(mpu.get_sequence_parallel_world_size())
    return int(mesh[1]) if mesh else 1


def trained_config(arguments: Mapping[str, Any]) -> Passed | None:
    """Return the `passed_config` of an engine that is to train; None for a reference model.

    An engine is to train if the call passes an optimizer or parameters, or if the configuration has
    a section `optimizer`. With accelerate, the section does not count: a reference model may share
    the configuration (TRL's `prepare_deepspeed`).
    """
    config = passed_config(arguments)
    if config is None or _names_what_to_train(arguments):
        return config
    is_own = "optimizer" in config.content and not accelerate_makes_engines()
    return config if is_own else None


def accelerate_makes_engines() -> bool:
    """Return whether the script uses accelerate with DeepSpeed, as the Trainer does."""
    state: Any = sys.modules.get("accelerate.state")
    shared = {} if state is None else state.AcceleratorState._shared_state
    # accelerate below 1.2 has a single plugin.
    return bool(shared.get("deepspeed_plugins") or shared.get("deepspeed_plugin"))


def _batch(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ds_config.BATCH_KEYS if key in config}


def _names_what_to_train(arguments: Mapping[str, Any]) -> bool:
    return any(arguments.get(name) is not None for name in ("optimizer", "model_parameters"))


def read_config(value: Any) -> dict[str, Any] | None:
    """Read a configuration of the script, a dict or a file; None if it is unreadable."""
    if isinstance(value, dict):
        return value
    try:
        return ds_config.parse(Path(value).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError):  # DeepSpeed will say so
        return None
