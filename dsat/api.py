"""The Python API: what the command line does, for programs and notebooks.

Takes the same words as the command line and has the same defaults. Nothing is printed, no signal
handler is installed, nothing exits: messages go to the logger `dsat`, errors are `DsatError`s.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsat.app.estimate import Estimate
from dsat.app.estimate import estimate as _estimate
from dsat.errors import UserInputError
from dsat.inputs.option import Option, options_of
from dsat.inputs.settings import EstimateSettings
from dsat.space.knobs import KNOB_NAMES

__all__ = ["Estimate", "estimate"]

_EXPERIMENT_SUFFIXES = (".yaml", ".yml")
Target = str | os.PathLike[str] | Sequence[str]


def estimate(
    target: Target, model_dir: str | os.PathLike[str] | None = None, **options: Any
) -> Estimate:
    """Tells what memory each ZeRO stage and offloading needs, without running a trial.

    Args:
        target: what to look at; as for `tune`.
        model_dir: the folder of an experiment's script; by default the configuration's own.
        options: see below.

    Returns:
        The table: `lines`, each with its `strategy`, `slots` and memory; `str` of it is what
        `dsat estimate` prints.

    Raises:
        UserInputError: something of the arguments or the files is wrong.
        DsatError: the script cannot be simulated.
    """
    declared = _for_python(options_of(EstimateSettings))
    return _estimate(
        EstimateSettings(**_target(target, model_dir), **_settings(declared, options, "estimate"))
    )


def _target(target: Target, model_dir: str | os.PathLike[str] | None) -> dict[str, Any]:
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


def _for_python(options: Iterable[Option]) -> dict[str, Option]:
    """The options by their keywords, without what means something to a shell only."""
    return {own.keyword: own for own in options if not own.shell_only}


def _settings(
    declared: Mapping[str, Option], given: Mapping[str, Any], function: str
) -> dict[str, Any]:
    """The settings that keyword arguments mean.

    Raises:
        UserInputError: a value is wrong.
        TypeError: there is no such keyword, as for any function.
    """
    found = {}
    for keyword, value in given.items():
        if keyword not in declared:
            raise TypeError(f"{function}() got an unexpected keyword argument {keyword!r}")
        own = declared[keyword]
        try:
            found[own.name] = own.from_python(value, KNOB_NAMES)
        except ValueError as error:
            raise UserInputError(str(error), where=keyword) from None
    return found


def _document(function: Any, options: Mapping[str, Option]) -> None:
    """Gives a function the keywords, defaults and help of options, for `help()` and editors."""
    signature = inspect.signature(function)
    known = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    keywords = [
        inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=own.default)
        for keyword, own in options.items()
        if keyword not in signature.parameters
    ]
    function.__signature__ = signature.replace(parameters=[*known, *keywords])
    said = [
        f"    {keyword}: {own.help.replace('%%', '%').replace('{knobs}', ', '.join(KNOB_NAMES))}"
        for keyword, own in options.items()
    ]
    assert function.__doc__ is not None
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__), "", "Options:", *said])


_document(estimate, _for_python(options_of(EstimateSettings)))
