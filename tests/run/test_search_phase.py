"""A search uses few CPU cores, so that trials have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from benchmarks.searching import search
from dsat.search import SEARCHES, Context, ModelSearch, Observation, Proposal, Stop, Wait
from testing.helpers import plan_of, ran, weightless


def blas_threads() -> set[int]:
    """Return the numbers of threads of numpy's linear algebra; other packages have their own
    BLAS."""
    blas = [found for found in threadpool_info() if found["user_api"] == "blas"]
    of_numpy = [found for found in blas if "numpy" in found["filepath"]] or blas
    return {found["num_threads"] for found in of_numpy}


def test_a_search_leaves_the_cores_to_the_trials_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []

    class Watched(ModelSearch):
        def propose(
            self, observations: Sequence[Observation], context: Context
        ) -> Proposal | Wait | Stop:
            seen.append(blas_threads())
            return super().propose(observations, context)

    monkeypatch.setitem(SEARCHES, "watched", Watched)
    with threadpool_limits(2, user_api="blas"):
        search(plan_of("watched", max_trials=4), lambda _: replace(ran(), profile=weightless(15)))
        assert blas_threads() == {2}
    assert seen and all(each == {1} for each in seen)
