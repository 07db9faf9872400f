"""The made-up clusters behave as their sources say."""

from __future__ import annotations

from typing import Any

from benchmarks.ledger import OBJECTIVE
from benchmarks.made_up_cluster import Cluster, all_clusters
from dsat.values.trial import BatchTriple

SMALL, _, LARGE = all_clusters()


def speed(cluster: Cluster, size: int, gas: int = 1, **settings: Any) -> float:
    """Samples/s; 0 if memory runs out."""
    batch = BatchTriple(size * gas * cluster.header.slots, size, gas)
    return cluster.answer(cluster.config(settings, batch)).value(OBJECTIVE) or 0.0


def test_the_best_is_no_corner() -> None:
    assert speed(LARGE, 1, stage=0) == 0 < speed(LARGE, 1, stage=1), "states are partitioned"
    for cluster in (SMALL, LARGE):
        size, best = cluster.largest_micro_batch, cluster.best(OBJECTIVE)
        assert speed(cluster, size + 1, stage=3) == 0
        assert 0 < speed(cluster, size, stage=3, reduce_bucket_size=5 * 10**6) < 0.97 * best


def test_accumulation_saves_what_comes_once_a_step() -> None:
    """Stage 2 reduces in every micro step, stage 1 in the last one alone."""
    gains = [speed(LARGE, 2, 8, stage=stage) / speed(LARGE, 2, stage=stage) for stage in (1, 2)]
    assert gains[0] > gains[1] > 1
