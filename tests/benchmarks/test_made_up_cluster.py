"""The made-up clusters behave as their sources say."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.ledger import OBJECTIVE
from benchmarks.made_up_cluster import Cluster, all_clusters
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple

SMALL, _, LARGE = all_clusters()


def outcome(cluster: Cluster, size: int, gas: int = 1, **settings: Any) -> Outcome:
    slots = cluster.header.slots
    return cluster.answer(cluster.config(settings, BatchTriple(size * gas * slots, size, gas)))


def speed(cluster: Cluster, size: int, gas: int = 1, **settings: Any) -> float:
    found = outcome(cluster, size, gas, **settings).value(OBJECTIVE)
    assert found is not None
    return found


def test_seven_billion_parameters_need_their_states_partitioned() -> None:
    assert outcome(LARGE, 1, stage=0).kind is OutcomeKind.OOM
    assert outcome(LARGE, 1, stage=1).ok


@pytest.mark.parametrize("cluster", [SMALL, LARGE], ids=lambda cluster: cluster.header.name)
def test_the_best_is_no_corner(cluster: Cluster) -> None:
    """The largest micro batch of any settings is slower than the best."""
    size, best = cluster.largest_micro_batch, cluster.best(OBJECTIVE)
    assert speed(cluster, size, stage=3, reduce_bucket_size=5 * 10**6) < 0.97 * best
    assert outcome(cluster, size + 1, stage=3).kind is OutcomeKind.OOM


def test_accumulation_saves_what_comes_once_a_step() -> None:
    """Stage 2 reduces in every micro step, stage 1 in the last one alone."""
    gains = [speed(LARGE, 2, 8, stage=stage) / speed(LARGE, 2, stage=stage) for stage in (1, 2)]
    assert gains[0] > gains[1] > 1
