"""The searches by the names that the command line gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsat.options import Option
from dsat.search.base import Context, Observation, Problem, Proposal, Search, Stop, Wait
from dsat.search.classic import ASHASearch, BinarySearch, RandomSearch
from dsat.search.grid import GridSearch
from dsat.search.model import ModelSearch

SEARCHES: dict[str, type[Search]] = {
    "model": ModelSearch,
    "asha": ASHASearch,
    "binary": BinarySearch,
    "random": RandomSearch,
    "gridsearch": GridSearch,
}


def options_of(method: str) -> Mapping[str, Option]:
    """Return the options of a search by the parameters that take their values.

    An unknown search has none. A subclass inherits none, since its constructor may differ.
    """
    found: Mapping[str, Option] = vars(SEARCHES.get(method, Search)).get("options", {})
    return found


def usual_options(method: str) -> dict[str, Any]:
    """Return the values that the options of a search have by default."""
    return {name: option.initial for name, option in options_of(method).items()}


__all__ = [
    "SEARCHES",
    "ASHASearch",
    "BinarySearch",
    "Context",
    "GridSearch",
    "ModelSearch",
    "Observation",
    "Problem",
    "Proposal",
    "RandomSearch",
    "Search",
    "Stop",
    "Wait",
    "options_of",
]
