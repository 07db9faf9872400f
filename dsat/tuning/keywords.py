"""Keyword arguments of the Python API as settings, by the declared options."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from dsat.engines import places
from dsat.errors import UserInputError
from dsat.options import Option, options_of
from dsat.prepare.simulated_model import ModelSettings
from dsat.search import SEARCHES, parameters_of
from dsat.search import options_of as options_of_search
from dsat.space.knobs import KNOB_NAMES
from dsat.tuning.settings import RUN, TUNE, Settings

PathLike = str | os.PathLike[str]
Target = PathLike | Sequence[PathLike]
_Settings = TypeVar("_Settings", bound=ModelSettings)

_EXPERIMENT_SUFFIXES = (".yaml", ".yml")


def of_tune() -> dict[str, Option]:
    """Return the keywords of `dsat.tune`, those of all methods."""
    found = _declared(places.complete(options_of(Settings)))
    for method in SEARCHES:
        for own in options_of_search(method).values():
            found.setdefault(own.keyword, own)
    return found


def of_model(kind: type[ModelSettings]) -> dict[str, Option]:
    """Return the keywords of `dsat.estimate` or `dsat.project`."""
    return _declared(options_of(kind))


def model_settings(
    kind: type[_Settings],
    target: Target | None,
    model_dir: PathLike | None,
    given: Mapping[str, Any],
) -> _Settings:
    """Make settings of the arguments of `dsat.estimate` or `dsat.project`.

    Raises:
        UserInputError: a value is wrong.
        TypeError: there is no such keyword, as for any function.
    """
    given = {"model" if name == "hf_config" else name: value for name, value in given.items()}
    values = _values(of_model(kind), given, f"{kind.function}()")
    if target is None and values.get("model") is not None:
        return kind(**values)
    if target is None:
        raise UserInputError(
            "is missing", where="target", hint="Give a script, a command, or model=MODEL."
        )
    return kind(**_target(target, model_dir), **values)


def search_settings(
    target: Target,
    model_dir: PathLike | None,
    method: str,
    search_options: Mapping[str, Any] | None,
    given: Mapping[str, Any],
    *,
    engines: Collection[str],
) -> Settings:
    """Make settings of the arguments of `dsat.tune`.

    Args:
        method: the search, or a command of DeepSpeed's autotuner.
        search_options: of a search that has no declared options.
        engines: names that `engine` may have besides the declared ones.

    Raises:
        UserInputError: a value is wrong.
        TypeError: there is no such keyword for the method, as for any function.
    """
    if method not in (*SEARCHES, TUNE, RUN):
        raise UserInputError(
            f"invalid choice: {method!r} (choose from {', '.join([*SEARCHES, TUNE, RUN])})",
            where="method",
        )
    declared = _declared(places.complete(options_of(Settings)))
    own_engine = declared["engine"]
    declared["engine"] = replace(own_engine, choices=(*(own_engine.choices or ()), *engines))
    declared |= {own.keyword: own for own in options_of_search(method).values()}
    wanted = _target(target, model_dir)
    values = _values(declared, given, f"tune(method={method!r})")
    if method in (TUNE, RUN):
        wanted["command"] = _launched(wanted, method)
        values["run_full_experiment"] = method == RUN
    known = parameters_of(method)
    if unknown := [name for name in search_options or {} if name not in known]:
        raise UserInputError(
            f"method {method!r} takes no {unknown[0]!r} (choose from {', '.join(sorted(known))})",
            where="search_options",
        )
    return settings_of({**wanted, **values, "method": method}, search_options or {})


def settings_of(values: Mapping[str, Any], search_options: Mapping[str, Any] = {}) -> Settings:
    """Make settings of values by the names of settings, and by keyword for searches and places."""
    left = dict(values)
    own_options = options_of_search(left["method"])
    own = {name: left.pop(one.keyword, one.initial) for name, one in own_options.items()}
    of_places = {one.keyword: left.pop(one.keyword, None) for one in places.options()}
    place_options = places.given_options(of_places, left.get("engine", places.AUTO))
    return Settings(**left, search_options={**own, **search_options}, place_options=place_options)


def help_of(own: Option) -> str:
    """Return the text of an option for people."""
    return own.help.replace("{knobs}", ", ".join(KNOB_NAMES))


def document(function: Any, options: Mapping[str, Option]) -> None:
    """Give a function the keywords, defaults and help of options, for `help()` and editors."""
    signature = inspect.signature(function)
    known = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    keywords = [
        inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=own.default)
        for keyword, own in options.items()
    ]
    function.__signature__ = signature.replace(parameters=[*known, *keywords])
    lines = [f"    {key}: {help_of(own).replace('%%', '%')}" for key, own in options.items()]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__), "", "Options:", *lines])


def _launched(wanted: Mapping[str, Any], method: str) -> tuple[str, ...]:
    """Put DeepSpeed's launcher in front of a command, as `dsat tune` and `dsat run` do."""
    command: tuple[str, ...] = wanted.get("command", ())
    if not command:
        raise UserInputError(f"method={method!r} takes a script or a command", where="target")
    return command if command[0] == "deepspeed" else ("deepspeed", *command)


def _target(target: Target, model_dir: PathLike | None) -> dict[str, Any]:
    """Return the settings that name the target."""
    if isinstance(target, (str, os.PathLike)):
        path = Path(target)
        if len(str(path).split()) > 1 and not os.path.exists(path):
            raise UserInputError(
                "there is no such file",
                where=f"target {target!r}",
                hint='Give a command as a list of words, such as ["deepspeed", "train.py"].',
            )
        if model_dir is None and path.suffix not in _EXPERIMENT_SUFFIXES:
            return {"command": (str(path),)}
        return {"config": path, "model_dir": path.parent if model_dir is None else Path(model_dir)}
    if model_dir is not None:
        raise UserInputError("is for an experiment configuration, not a command", where="model_dir")
    words = list(target) if isinstance(target, Sequence) else []
    if not words or not all(isinstance(word, (str, os.PathLike)) for word in words):
        raise UserInputError(
            "is neither a path nor a list of words",
            where=f"target {target!r}",
            hint='Give a script, an experiment configuration, or a command such as ["train.py"].',
        )
    return {"command": tuple(map(os.fspath, words))}


def _declared(options: Iterable[Option]) -> dict[str, Option]:
    """Return options by their keywords, without those of the command line only."""
    return {own.keyword: own for own in options if not own.shell_only}


def _values(
    declared: Mapping[str, Option], given: Mapping[str, Any], called: str
) -> dict[str, Any]:
    """Return the values of keyword arguments, by the names of their settings."""
    found = {}
    for keyword, value in given.items():
        if keyword not in declared:
            raise TypeError(f"{called} got an unexpected keyword argument {keyword!r}")
        own = declared[keyword]
        try:
            found[own.name or keyword] = own.from_python(value)
        except ValueError as error:
            raise UserInputError(str(error), where=keyword) from None
    return found
