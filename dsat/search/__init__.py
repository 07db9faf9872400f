"""The searches by the names that the command line gives them."""

from __future__ import annotations

from dsat.search.asha import ASHASearch
from dsat.search.base import Search
from dsat.search.binary import BinarySearch
from dsat.search.grid import GridSearch
from dsat.search.model import ModelSearch
from dsat.search.random_search import RandomSearch

SEARCHES: dict[str, type[Search]] = {
    "asha": ASHASearch,
    "binary": BinarySearch,
    "random": RandomSearch,
    "gridsearch": GridSearch,
    "model": ModelSearch,
}

__all__ = [
    "SEARCHES",
    "ASHASearch",
    "BinarySearch",
    "GridSearch",
    "ModelSearch",
    "RandomSearch",
    "Search",
]
