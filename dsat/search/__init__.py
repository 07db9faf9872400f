"""The searches by the names that the command line gives them."""

from __future__ import annotations

from collections.abc import Mapping

from dsat.inputs.option import Option
from dsat.search.asha import ASHASearch
from dsat.search.base import Search
from dsat.search.binary import BinarySearch
from dsat.search.grid import GridSearch
from dsat.search.model import ModelSearch
from dsat.search.random_search import RandomSearch

SEARCHES: dict[str, type[Search]] = {
    "model": ModelSearch,
    "asha": ASHASearch,
    "binary": BinarySearch,
    "random": RandomSearch,
    "gridsearch": GridSearch,
}


def options_of(method: str) -> Mapping[str, Option]:
    """Return the options of a search by the parameters that take their values.

    None if it is unknown. A subclass does not inherit them: its constructor may take others.
    """
    found: Mapping[str, Option] = vars(SEARCHES.get(method, Search)).get("options", {})
    return found


__all__ = [
    "SEARCHES",
    "ASHASearch",
    "BinarySearch",
    "GridSearch",
    "ModelSearch",
    "RandomSearch",
    "Search",
    "options_of",
]
