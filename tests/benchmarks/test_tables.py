"""Tables: how they are recorded, and what is answered from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import grid, record, tables
from benchmarks.grid import Cell, Grid
from benchmarks.tables import Row as Recorded
from benchmarks.tables import Table
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple
from tests.benchmarks.made_up_table import (
    HEADER,
    config_of,
    outcome_of,
)

# -- recording


@pytest.mark.parametrize(
    ("edge", "largest", "asked"),
    [
        (0, 1024, [1]),
        (5, 1024, [1, 2, 4, 8, 6, 5]),
        (53, 1024, [1, 2, 4, 8, 16, 32, 64, 48, 56]),
        (99, 8, [1, 2, 4, 8]),
    ],
)
def test_the_edge_is_bisected_once_doubling_has_passed_it(
    edge: int, largest: int, asked: list[int]
) -> None:
    known: dict[int, bool] = {}
    for size in asked:
        assert grid.next_size(known, largest) == size
        known[size] = size <= edge
    assert grid.next_size(known, largest) is None


def _small_grid(passes: int, *lines: dict[str, Any]) -> Grid:
    return Grid(record.grid(stage=[0, 1]), 4096, passes, lines)


def _ended(*, ok: bool) -> Outcome:
    return outcome_of({"stage": 0}, 1) if ok else Outcome(OutcomeKind.OOM)


def test_further_passes_begin_when_all_edges_are_known() -> None:
    small = _small_grid(3)
    running: list[Cell] = []
    ended = []
    while True:
        while (cell := small.begin()) is not None:
            running.append(cell)
        if not running:
            break
        cell = running.pop()
        small.end(cell, _ended(ok=cell.micro_batch <= 2 - cell.settings))
        ended.append(cell)
    passes = [cell.number for cell in ended]
    assert passes[:6] == [1] * 6 and len(set(ended)) == len(ended)
    assert sorted(passes[6:]) == [2, 2, 2, 3, 3, 3]
    for number in (2, 3):
        cells = {(c.settings, c.micro_batch) for c in ended if c.number == number}
        assert cells == {(0, 1), (0, 2), (1, 1)}, "nothing that is out of memory"


def test_a_recording_goes_on_with_what_its_pass_lacks() -> None:
    def line(stage: int, size: int, number: int, *, ok: bool = True) -> dict[str, Any]:
        outcome = outcome_of({"stage": 0}, size) if ok else Outcome(OutcomeKind.OOM)
        return tables.of_pass(Recorded({"stage": stage}, size, 1, 1, outcome), number)

    first = [line(0, 1, 1), line(0, 2, 1, ok=False), line(1, 1, 1), line(1, 2, 1, ok=False)]
    assert _small_grid(1, *first).begin() is None
    assert _small_grid(2, *first).begin() == Cell(0, 1, 2)
    small = _small_grid(2, *first, line(0, 1, 2))
    assert small.begin() == Cell(1, 1, 2)
    assert small.begin() is None


def test_of_several_passes_a_table_has_the_median(table: Table, tmp_path: Path) -> None:
    row = next(row for row in table.rows if row.outcome.ok)
    assert row.outcome.metrics is not None

    def measured(throughput: float) -> Recorded:
        assert row.outcome.metrics is not None
        metrics = replace(row.outcome.metrics, throughput=throughput)
        return replace(row, outcome=replace(row.outcome, metrics=metrics))

    lost = replace(row, outcome=Outcome(OutcomeKind.OOM))
    other = replace(row, micro_batch=1000)
    three, two = measured(3.0), measured(2.0)
    assert tables.fold([three, other, measured(5.0), two]) == [three, other]
    assert tables.fold([three, two]) == [two]
    assert tables.fold([lost, three, two]) == [two]
    apart = [
        three,
        two,
        replace(measured(8.0), micro_batch=7),
        replace(measured(8.0), micro_batch=7),
    ]
    assert tables.spread(apart) == pytest.approx((0.4 + 0) / 2)
    assert tables.spread([three, other, lost]) is None
    path = tmp_path / "made-up.jsonl"
    lines = [HEADER.to_json(), *(tables.of_pass(r, n) for n, r in enumerate((three, two), 1))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    compressed = tables.read(tables.compress(path))
    assert tables.read(path).rows == compressed.rows == (two,)
    assert compressed.header.about[tables.APART] == "40.0%"


def test_a_table_is_read_as_it_was_written(table: Table, tmp_path: Path) -> None:
    lines = [HEADER.to_json(), *(row.to_json() for row in table.rows)]
    path = tmp_path / "made-up.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    compressed = tables.compress(path)
    first = compressed.read_bytes()
    again = tables.read(compressed)
    assert (again.header, again.rows) == (table.header, table.rows)
    assert tables.compress(path).read_bytes() == first
    assert tables.read(path).rows == table.rows
    assert [t.header.name for t in tables.read_all(tmp_path)] == ["made-up"]


# -- answers


def test_what_was_recorded_is_answered_as_it_was(table: Table) -> None:
    for row in table.rows:
        answer = table.answer(
            table.config(row.settings, BatchTriple(row.micro_batch, row.micro_batch, 1))
        )
        assert answer.kind == row.outcome.kind
        assert answer.duration_s == row.outcome.duration_s
        if answer.metrics is not None:
            assert row.outcome.metrics is not None
            assert answer.metrics.throughput == row.outcome.metrics.throughput
            assert answer.metrics.latency == row.outcome.metrics.latency


def test_throughput_is_linear_between_recorded_micro_batches(table: Table) -> None:
    low, middle, high = (table.answer(config_of(0, size)).metrics for size in (16, 20, 32))
    assert low is not None and middle is not None and high is not None
    assert middle.throughput == pytest.approx(0.75 * low.throughput + 0.25 * high.throughput)
    assert middle.latency == pytest.approx(20 / middle.throughput * 1e3)
    assert middle.forward == pytest.approx(400)


def test_beyond_the_edge_is_out_of_memory(table: Table) -> None:
    largest = max(r.micro_batch for r in table.rows if r.outcome.ok and r.settings["stage"] == 0)
    assert table.answer(config_of(0, largest)).ok
    assert table.answer(config_of(0, largest + 1)).kind is OutcomeKind.OOM
    assert table.answer(config_of(0, 10**6)).kind is OutcomeKind.OOM


@pytest.mark.parametrize(
    ("zero", "like"),
    [
        # DeepSpeed's own bucket of 5e8 elements leaves room for fewer samples.
        ({}, {"reduce_bucket_size": 5 * 10**8}),
        ({"reduce_bucket_size": 10**8}, {"reduce_bucket_size": 5 * 10**6}),
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
    assert thrice.metrics.latency == pytest.approx(200 + 3 * 400)
    assert thrice.metrics.throughput == pytest.approx(24 / 1.4)
    assert thrice.metrics.step == once.metrics.step
    assert thrice.duration_s == pytest.approx(once.duration_s + 3 * 0.8)
