"""The recorded table that several tests of the benchmarks use."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import record
from benchmarks.made_up_cluster import Cluster
from benchmarks.tables import Row, Table
from dsat.values.trial import BatchTriple
from testing.world import A100, GPT_300M

CLUSTER = Cluster("made-up", GPT_300M, A100, slots=1)
HEADER = CLUSTER.header


@pytest.fixture(scope="session")
def table() -> Table:
    """Make a table as `record` would record it: doubled micro batches, then a bisected edge."""
    rows = []
    for settings in record.SETTINGS:
        known: dict[int, bool] = {}
        while (size := record.next_size(known, 4096)) is not None:
            batch = BatchTriple(size, size, 1)
            outcome = CLUSTER.answer(CLUSTER.config(settings, batch))
            known[size] = outcome.ok
            rows.append(Row(settings, size, outcome))
    return Table(HEADER, rows)


def config_of(stage: int, size: int, gas: int = 1, **zero: Any) -> dict[str, Any]:
    return CLUSTER.config({"stage": stage, **zero}, BatchTriple(size * gas, size, gas))
