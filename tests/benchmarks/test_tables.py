"""Tables: how they are recorded, and how they answer trials."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record, tables
from benchmarks.ledger import OBJECTIVE
from benchmarks.record import Spec
from benchmarks.tables import Row, Table
from dsat.engines.machines.hosts import Host
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple
from testing import warm_host
from testing.local import cpu_machine
from tests.benchmarks.conftest import CLUSTER, HEADER, config_of

SPEC = Spec("small", "gpt-5m", 16, 600 * 2**20, settings=record.grid(stage=[0, 1]))


def test_the_edge_is_bisected_once_doubling_has_passed_it() -> None:
    for edge, largest, asked in (
        (0, 1024, [1]),
        (5, 1024, [1, 2, 4, 8, 6, 5]),
        (53, 1024, [1, 2, 4, 8, 16, 32, 64, 48, 56]),
        (99, 8, [1, 2, 4, 8]),
    ):
        known: dict[int, bool] = {}
        while (size := record.next_size(known, largest)) is not None:
            known[size] = size <= edge
        assert list(known) == asked


def _recorded(spec: Spec, killed_after: int = 1000) -> list[dict[str, Any]]:
    """Return the rows of a recording in which two samples fit in stage 0, and one in stage 1."""
    rows: list[dict[str, Any]] = []
    while len(rows) < killed_after and (following := record.next_trial(spec, rows)) is not None:
        settings, size, number = following
        fits = size <= 2 - settings["stage"]
        outcome = CLUSTER.answer(config_of(0, 1)) if fits else Outcome(OutcomeKind.OOM)
        rows.append(tables.of_pass(Row(settings, size, outcome), number))
    return rows


def test_further_passes_measure_what_runs_once_all_edges_are_known() -> None:
    rows = _recorded(SPEC)
    cells = [(row["settings"]["stage"], row["micro_batch"], row["pass"]) for row in rows]
    assert cells[:5] == [(0, 1, 1), (0, 2, 1), (0, 4, 1), (0, 3, 1), (1, 1, 1)]
    assert cells[6:] == [(s, m, n) for n in (2, 3) for s, m in ((0, 1), (0, 2), (1, 1))]
    assert _recorded(SPEC, killed_after=8) == rows[:8], "a killed recording goes on where it was"
    assert record.next_trial(SPEC, rows[:8]) == ({"stage": 1}, 1, 2)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_small_table_is_really_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "Host", functools.partial(Host, reach=warm_host.prefix()))
    settings = record.grid(stage=[1], reduce_bucket_size=[10**6, 10**9])
    spec = replace(SPEC, settings=settings, largest=2, passes=2)
    table = tables.read(record.record(spec, cpu_machine(1), tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["small.jsonl.gz"]
    assert table.header.profile.num_params > 5 * 10**6
    # The large bucket of 4 GB cannot fit in the slot, so it is tried once.
    found = [(row.micro_batch, row.outcome.kind.value, row.outcome.detail) for row in table.rows]
    assert found == [(1, "OK", ""), (2, "OK", ""), (1, "OOM", "")]


def test_of_several_passes_a_table_has_the_median(table: Table) -> None:
    row = next(row for row in table.rows if row.outcome.ok)

    def measured(throughput: float) -> Row:
        assert row.outcome.metrics is not None
        metrics = replace(row.outcome.metrics, throughput=throughput)
        return replace(row, outcome=replace(row.outcome, metrics=metrics))

    lost, other = replace(row, outcome=Outcome(OutcomeKind.OOM)), replace(row, micro_batch=1000)
    three, two = measured(3.0), measured(2.0)
    assert tables.fold([three, other, measured(5.0), two]) == [three, other]
    assert tables.fold([three, two]) == tables.fold([lost, three, two]) == [two]


def test_a_table_is_folded_and_read_as_it_was_written(table: Table, tmp_path: Path) -> None:
    path = tmp_path / "made-up.jsonl"
    twice = [tables.of_pass(row, number) for number in (1, 2) for row in table.rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in (HEADER.to_json(), *twice)))
    first = tables.compress(path).read_bytes()
    assert tables.compress(path).read_bytes() == first
    [again] = tables.read_all(tmp_path)
    assert again.rows == tables.read(path).rows == table.rows
    assert again.header == HEADER


def test_what_was_recorded_is_answered_as_it_was(table: Table) -> None:
    for row in table.rows:
        batch, recorded = BatchTriple(row.micro_batch, row.micro_batch, 1), row.outcome
        answer = table.answer(table.config(row.settings, batch))
        assert (answer.kind, answer.duration_s) == (recorded.kind, recorded.duration_s)
        assert answer.value(OBJECTIVE) == recorded.value(OBJECTIVE)


def test_between_recorded_micro_batches_throughput_is_linear_up_to_the_edge(table: Table) -> None:
    low, middle, high = (table.answer(config_of(0, size)).metrics for size in (8, 10, 16))
    assert low is not None and middle is not None and high is not None
    assert middle.throughput == pytest.approx(0.75 * low.throughput + 0.25 * high.throughput)
    assert middle.latency == pytest.approx(10 / middle.throughput * 1e3)
    assert middle.forward == pytest.approx(0.75 * low.forward + 0.25 * high.forward)
    largest = max(r.micro_batch for r in table.rows if r.outcome.ok and r.settings["stage"] == 0)
    kinds = [table.answer(config_of(0, size)).kind for size in (largest, largest + 1, 10**6)]
    assert kinds == [OutcomeKind.OK, OutcomeKind.OOM, OutcomeKind.OOM]


@pytest.mark.parametrize(
    ("zero", "like"),
    [
        ({}, {"reduce_bucket_size": 10**8}),  # DeepSpeed's default is even larger
        ({"reduce_bucket_size": 6 * 10**7}, {"reduce_bucket_size": 10**8}),
        ({"reduce_bucket_size": 4 * 10**7}, {"reduce_bucket_size": 5 * 10**6}),
        ({"reduce_bucket_size": 10**6, "overlap_comm": True}, {"reduce_bucket_size": 5 * 10**6}),
        (
            {"reduce_bucket_size": 5 * 10**9, "contiguous_gradients": False},
            {"reduce_bucket_size": 5 * 10**8, "contiguous_gradients": False},
        ),
    ],
)
def test_settings_are_answered_from_the_nearest_ones(
    table: Table, zero: dict[str, Any], like: dict[str, Any]
) -> None:
    for size in (1, 8, 16, 32, 64):
        assert table.answer(config_of(1, size, **zero)) == table.answer(config_of(1, size, **like))


def test_accumulation_repeats_the_passes_and_not_the_step(table: Table) -> None:
    once, thrice = table.answer(config_of(1, 8)), table.answer(config_of(1, 8, gas=3))
    assert once.metrics is not None and thrice.metrics is not None
    more_ms = 2 * (once.metrics.latency - once.metrics.step)
    assert thrice.metrics.latency == pytest.approx(once.metrics.latency + more_ms)
    assert thrice.metrics.throughput == pytest.approx(24e3 / thrice.metrics.latency)
    assert thrice.metrics.step == once.metrics.step
    steps = 1 + once.metrics.num_steps
    assert thrice.duration_s == pytest.approx(once.duration_s + steps * more_ms / 1e3)
