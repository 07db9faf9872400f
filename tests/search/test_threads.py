"""A search leaves the cores to the trials that are measured beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from dsat.search.threads import in_one_thread
from testing.helpers import ran, search_of, space_of


def threads() -> set[int]:
    """Return the threads of numpy's linear algebra; other packages bring a BLAS of their own."""
    blas = [found for found in threadpool_info() if found["user_api"] == "blas"]
    of_numpy = [found for found in blas if "numpy" in found["filepath"]] or blas
    return {found["num_threads"] for found in of_numpy}


def test_a_search_decides_in_one_thread_and_changes_nothing_for_others() -> None:
    seen: list[set[int]] = []

    def predict(settings: Mapping[str, Any]) -> float:
        seen.append(threads())
        return 15.0

    with threadpool_limits(2, user_api="blas"):
        search = search_of("model", space_of(4), predict=predict)
        seen.clear()
        proposal = search.ask()
        assert proposal is not None
        search.tell(proposal, ran(1.0))
        assert threads() == {2}
    assert seen and all(each == {1} for each in seen)


def test_what_fails_in_one_thread_leaves_the_others_as_they_were() -> None:
    @in_one_thread
    def failing() -> None:
        assert threads() == {1}
        raise KeyError

    with threadpool_limits(2, user_api="blas"):
        with pytest.raises(KeyError):
            failing()
        assert threads() == {2}
