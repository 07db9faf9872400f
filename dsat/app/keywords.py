"""Keyword arguments of the Python API as settings, by the declared options."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.engines import places
from dsat.errors import UserInputError
from dsat.inputs.estimate_settings import EstimateSettings
from dsat.inputs.option import Option, options_of
from dsat.inputs.settings import RUN, TUNE, Settings
from dsat.search import SEARCHES
from dsat.search import options_of as options_of_search
from dsat.space.knobs import KNOB_NAMES

PathLike = str | os.PathLike[str]
Target = PathLike | Sequence[str]

_EXPERIMENT_SUFFIXES = (".yaml", ".yml")


def of_tune() -> dict[str, Option]:
    """The keywords of `dsat.tune`, those of all methods."""
    found = _declared(Settings)
    for search in SEARCHES.values():
        for own in search.options.values():
            found.setdefault(own.keyword, own)
    return found


def of_estimate() -> dict[str, Option]:
    """The keywords of `dsat.estimate`."""
    return _declared(EstimateSettings)


def estimate_settings(
    target: Target | None, model_dir: PathLike | None, given: Mapping[str, Any]
) -> EstimateSettings:
    """The settings that the arguments of `dsat.estimate` mean.

    Raises:
        UserInputError: a value is wrong.
        TypeError: there is no such keyword, as for any function.
    """
    declared = _declared(EstimateSettings)
    values = _named(declared, _values(declared, given, "estimate()"))
    if target is None and values.get("hf_config") is not None:
        return EstimateSettings(**values)
    if target is None:
        raise UserInputError(
            "is missing", where="target", hint="Give a script, a command, or hf_config=PATH."
        )
    return EstimateSettings(**_target(target, model_dir), **values)


def search_settings(
    target: Target,
    model_dir: PathLike | None,
    method: str,
    search_options: Mapping[str, Any] | None,
    given: Mapping[str, Any],
    *,
    engines: Collection[str],
) -> Settings:
    """The settings that the arguments of `dsat.tune` mean.

    Args:
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
    own_options = options_of_search(method)
    own_declared = {own.keyword: own for own in own_options.values()}
    declared, wanted, given = _declared(Settings), _target(target, model_dir), dict(given)
    engine = given.pop("engine") if given.get("engine") in engines else None
    if method in (TUNE, RUN):
        wanted["command"] = _launched(wanted, method)
        given["run_full_experiment"] = method == RUN
    values = _values({**declared, **own_declared}, given, f"tune(method={method!r})")
    own_values = {name: values.pop(own.keyword, own.initial) for name, own in own_options.items()}
    of_places = {own.keyword: values.pop(own.keyword, None) for own in places.options()}
    settings = Settings(
        **wanted,
        **_named(declared, values),
        method=method,
        search_options={**own_values, **(search_options or {})},
        place_options=places.given_options(of_places, engine or values.get("engine", places.AUTO)),
    )
    return settings if engine is None else replace(settings, engine=engine)


def document(function: Any, options: Mapping[str, Option]) -> None:
    """Gives a function the keywords, defaults and help of options, for `help()` and editors."""
    signature = inspect.signature(function)
    known = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    keywords = [
        inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=own.default)
        for keyword, own in options.items()
    ]
    function.__signature__ = signature.replace(parameters=[*known, *keywords])
    said = [
        f"    {keyword}: {own.help.replace('%%', '%').replace('{knobs}', ', '.join(KNOB_NAMES))}"
        for keyword, own in options.items()
    ]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__), "", "Options:", *said])


def _launched(wanted: Mapping[str, Any], method: str) -> tuple[str, ...]:
    """A command with DeepSpeed's launcher in front, as `dsat tune` and `dsat run` mean theirs."""
    command: tuple[str, ...] = wanted.get("command", ())
    if not command:
        raise UserInputError(f"method={method!r} takes a script or a command", where="target")
    return command if command[0] == "deepspeed" else ("deepspeed", *command)


def _target(target: Target, model_dir: PathLike | None) -> dict[str, Any]:
    """What is tuned, as the settings have it."""
    if isinstance(target, (str, os.PathLike)):
        path = Path(target)
        if model_dir is None and path.suffix not in _EXPERIMENT_SUFFIXES:
            return {"command": (str(path),)}
        return {"config": path, "model_dir": path.parent if model_dir is None else Path(model_dir)}
    if model_dir is not None:
        raise UserInputError("is for an experiment configuration, not a command", where="model_dir")
    is_command = isinstance(target, Sequence) and all(isinstance(word, str) for word in target)
    if not is_command or not target:
        raise UserInputError(
            "is neither a path nor a list of words",
            where=f"target {target!r}",
            hint='Give a script, an experiment configuration, or a command such as ["train.py"].',
        )
    return {"command": tuple(target)}


def _declared(settings: Any) -> dict[str, Option]:
    """The options by their keywords, without what means something to a shell only."""
    options = options_of(settings)
    if settings is Settings:
        options = places.complete(options)
    return {own.keyword: own for own in options if not own.shell_only}


def _named(declared: Mapping[str, Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of their settings."""
    return {declared[keyword].name: value for keyword, value in values.items()}


def _values(
    declared: Mapping[str, Option], given: Mapping[str, Any], called: str
) -> dict[str, Any]:
    """What keyword arguments mean.

    Raises:
        UserInputError: a value is wrong.
        TypeError: there is no such keyword, as for any function.
    """
    found = {}
    for keyword, value in given.items():
        if keyword not in declared:
            raise TypeError(f"{called} got an unexpected keyword argument {keyword!r}")
        try:
            found[keyword] = declared[keyword].from_python(value, KNOB_NAMES)
        except ValueError as error:
            raise UserInputError(str(error), where=keyword) from None
    return found
