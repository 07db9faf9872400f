"""All searches by name, which `dsat tune --method NAME` and `dsat NAME` accept."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from dsat.options import Option
from dsat.search.base import Context, Observation, Problem, Proposal, Search, Stop, Wait
from dsat.search.classic import ASHASearch, BinarySearch, RandomSearch
from dsat.search.grid import GridSearch
from dsat.search.model import ModelSearch
from dsat.space.locate import Point

SEARCHES: dict[str, type[Search]] = {
    "model": ModelSearch,
    "asha": ASHASearch,
    "binary": BinarySearch,
    "random": RandomSearch,
    "gridsearch": GridSearch,
}
BUILT_IN = tuple(SEARCHES)

_SET_BY_RUNS = {"self", "problem"}


def options_of(method: str) -> Mapping[str, Option]:
    """Return a search's options, keyed by the constructor parameter that each one sets.

    An unknown search has none. Subclasses do not inherit options, because their constructors may
    differ.
    """
    options: Mapping[str, Option] = vars(SEARCHES.get(method, Search)).get("options", {})
    return options


def usual_options(method: str) -> dict[str, Any]:
    """Return the default values of a search's options, keyed by constructor parameter."""
    return {name: option.initial for name, option in options_of(method).items()}


def parameters_of(method: str) -> set[str]:
    """Return the constructor parameters of a search that users may set, inherited ones too."""
    names: set[str] = set()
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for ancestor in SEARCHES.get(method, Search).__mro__[:-1]:
        if "__init__" in vars(ancestor):
            parameters = inspect.signature(vars(ancestor)["__init__"]).parameters.values()
            names |= {parameter.name for parameter in parameters if parameter.kind not in unnamed}
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
                break
    return names - _SET_BY_RUNS


__all__ = [
    "SEARCHES",
    "ASHASearch",
    "BinarySearch",
    "Context",
    "GridSearch",
    "ModelSearch",
    "Observation",
    "Point",
    "Problem",
    "Proposal",
    "RandomSearch",
    "Search",
    "Stop",
    "Wait",
    "options_of",
    "parameters_of",
]
