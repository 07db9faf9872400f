"""The benchmarks' own parts: tables and answers, the drivers of the tuners, bars and report."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bars, grid, picture, record, results, tables
from benchmarks.by_hand import Compared
from benchmarks.grid import Cell, Grid
from benchmarks.ledger import OBJECTIVE, BudgetSpent, Ledger
from benchmarks.native import Tuned
from benchmarks.peers import PEERS, UNSEEDED, player
from benchmarks.replay import Episode, Summary, play, summaries
from benchmarks.tables import Header, Table
from benchmarks.tables import Row as Recorded
from benchmarks.winners_curse import Result, Row
from dsat.engines.local import Machine
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple
from testing.local import cpu_machine

# DeepSpeed's autotuner leaves files open, and Determined deprecates parts of its own.
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:determined",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)

PARAMS = 10**8
SAMPLE_BYTES = 20_000_000
SLOT_BYTES = 4 * 2**30
FIXED_MS = {0: 300.0, 1: 200.0, 2: 250.0, 3: 600.0}
PROFILE = ModelProfile(PARAMS, PARAMS, 4, SAMPLE_BYTES, 1e9, SLOT_BYTES)
HEADER = Header(
    name="made-up",
    command="train.py",
    ds_config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}},
    slots=1,
    slot_memory_bytes=SLOT_BYTES,
    profile=PROFILE,
    profile_duration_s=3.0,
    about={"date": "today"},
)


def _outcome(settings: dict[str, Any], size: int) -> Outcome:
    """A step takes so long for the optimizer and 50 ms for each sample; buckets take memory."""
    stage = settings["stage"]
    used = 20 * PARAMS + SAMPLE_BYTES * size
    if stage and settings.get("contiguous_gradients", True):
        used += 4 * settings["reduce_bucket_size"]
    if used > SLOT_BYTES:
        return Outcome(OutcomeKind.OOM, message="out of memory", duration_s=2.0)
    ms = FIXED_MS[stage] + 50 * size
    metrics = Metrics(size / ms * 1e3, ms, 20 * size, 30 * size, FIXED_MS[stage], 1e9, 2, 0.01)
    return Outcome(OutcomeKind.OK, metrics=metrics, duration_s=2.0 + 3 * ms / 1e3)


@pytest.fixture(scope="module")
def table() -> Table:
    """Recorded as `record` would: doubled micro batches, then a bisected edge."""
    rows = []
    for settings in record.SETTINGS:
        known: dict[int, bool] = {}
        while (size := grid.next_size(known, 4096)) is not None:
            outcome = _outcome(settings, size)
            known[size] = outcome.ok
            rows.append(Recorded(settings, size, 1, 1, outcome))
    return Table(HEADER, rows)


def _config(stage: int, size: int, gas: int = 1, **zero: Any) -> dict[str, Any]:
    return {
        **HEADER.ds_config,
        **BatchTriple(size * gas, size, gas).config(),
        "zero_optimization": {"stage": stage, **zero},
    }


# -- recording


def test_the_edge_is_bisected_once_doubling_has_passed_it() -> None:
    known: dict[int, bool] = {}
    asked = []
    while (size := grid.next_size(known, 1024)) is not None:
        asked.append(size)
        known[size] = size <= 53
    assert asked == [1, 2, 4, 8, 16, 32, 64, 48, 56]


@pytest.mark.parametrize(
    ("edge", "largest", "asked"),
    [(0, 1024, [1]), (1, 1024, [1, 2]), (5, 1024, [1, 2, 4, 8, 6, 5]), (99, 8, [1, 2, 4, 8])],
)
def test_a_grid_ends_where_nothing_more_is_to_be_learned(
    edge: int, largest: int, asked: list[int]
) -> None:
    known: dict[int, bool] = {}
    for size in asked:
        assert grid.next_size(known, largest) == size
        known[size] = size <= edge
    assert grid.next_size(known, largest) is None


def _small_grid(passes: int, *lines: dict[str, Any]) -> Grid:
    return Grid(record.grid(stage=[0, 1]), 4096, passes, lines)


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
        small.end(cell, ok=cell.micro_batch <= 2 - cell.settings)
        ended.append(cell)
    passes = [cell.number for cell in ended]
    assert passes[:6] == [1] * 6 and len(set(ended)) == len(ended)
    assert sorted(passes[6:]) == [2, 2, 2, 3, 3, 3]
    for number in (2, 3):
        cells = {(c.settings, c.micro_batch) for c in ended if c.number == number}
        assert cells == {(0, 1), (0, 2), (1, 1)}, "nothing that is out of memory"


def test_a_recording_goes_on_with_what_its_pass_lacks() -> None:
    def line(stage: int, size: int, number: int, *, ok: bool = True) -> dict[str, Any]:
        outcome = _outcome({"stage": 0}, size) if ok else Outcome(OutcomeKind.OOM)
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


def test_how_many_trials_are_close_to_the_best(table: Table) -> None:
    values = sorted(v for row in table.rows if (v := row.outcome.value(OBJECTIVE)) is not None)
    best = values[-1]
    for part in (0.0, 0.05, 0.5):
        close = [value for value in values if value >= best * (1 - part)]
        assert table.close_to_best(OBJECTIVE, part) == len(close)


def test_a_table_is_replaced_once_the_new_one_is_finished(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(record.SPECS[0], name="made-up")
    machine = cpu_machine(1)
    recorded: list[Path] = []

    def fake(spec: record.Spec, machine: Machine, folder: Path, *, concurrent: int) -> Path:
        path = folder / "made-up.jsonl"
        path.write_text(json.dumps(HEADER.to_json()) + "\n")
        recorded.append(tables.compress(path))
        path.unlink()
        return recorded[-1]

    def killed(spec: record.Spec, machine: Machine, path: Path) -> None:
        raise KeyboardInterrupt

    def predicted(spec: record.Spec, machine: Machine, path: Path) -> None:
        tables.with_memory(path, {"simulated": []})

    old = tmp_path / "made-up.jsonl.gz"
    tables._write(old, replace(HEADER, memory={"old": 1}), table.rows)
    before = old.read_bytes()
    monkeypatch.setattr(record, "record", fake)
    monkeypatch.setattr(record, "predict", killed)
    assert record.finish(spec, machine, tmp_path) == old and not recorded
    with pytest.raises(KeyboardInterrupt):
        record.again(spec, machine, tmp_path)
    assert old.read_bytes() == before and len(recorded) == 1
    monkeypatch.setattr(record, "predict", predicted)
    record.again(spec, machine, tmp_path)
    assert len(recorded) == 1, "only the simulation was left to do"
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    assert tables.read(old).header.memory == {"simulated": []}


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


def test_rows_that_cannot_be_answered_from_are_refused(table: Table) -> None:
    with pytest.raises(ValueError, match="made-up"):
        Table(HEADER, [replace(table.rows[0], gas=2)])
    with pytest.raises(ValueError, match="schema"):
        Header.from_json({**HEADER.to_json(), "table": 99})


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
    low, middle, high = (table.answer(_config(0, size)).metrics for size in (16, 20, 32))
    assert low is not None and middle is not None and high is not None
    assert middle.throughput == pytest.approx(0.75 * low.throughput + 0.25 * high.throughput)
    assert middle.latency == pytest.approx(20 / middle.throughput * 1e3)
    assert middle.forward == pytest.approx(400)


def test_beyond_the_edge_is_out_of_memory(table: Table) -> None:
    largest = max(r.micro_batch for r in table.rows if r.outcome.ok and r.settings["stage"] == 0)
    assert table.answer(_config(0, largest)).ok
    assert table.answer(_config(0, largest + 1)).kind is OutcomeKind.OOM
    assert table.answer(_config(0, 10**6)).kind is OutcomeKind.OOM


def test_a_grid_that_ended_before_its_edge_is_not_stretched() -> None:
    settings = {"stage": 0}
    few = Table(
        HEADER, [Recorded(settings, size, 1, 1, _outcome(settings, size)) for size in (1, 2)]
    )
    answer = few.answer(_config(0, 3))
    assert (answer.kind, answer.duration_s) == (OutcomeKind.OOM, few.rows[1].outcome.duration_s)


@pytest.mark.parametrize(
    ("zero", "like"),
    [
        # DeepSpeed's own bucket of 5e8 elements leaves room for fewer samples.
        ({}, {"reduce_bucket_size": 5 * 10**8}),
        ({"reduce_bucket_size": 10**6}, {"reduce_bucket_size": 5 * 10**6}),
        ({"reduce_bucket_size": 10**8}, {"reduce_bucket_size": 5 * 10**6}),
        ({"reduce_bucket_size": 4 * 10**8}, {"reduce_bucket_size": 5 * 10**8}),
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
        assert table.answer(_config(1, size, **zero)) == table.answer(_config(1, size, **like))


def test_a_bucket_that_a_slot_cannot_hold_is_out_of_memory(table: Table) -> None:
    too_large = 5 * 10**9
    assert table.answer(_config(2, 1, reduce_bucket_size=too_large)).kind is OutcomeKind.OOM
    assert table.answer(_config(0, 1, reduce_bucket_size=too_large)).ok


def test_accumulation_repeats_the_passes_and_not_the_step(table: Table) -> None:
    once, thrice = table.answer(_config(1, 8)), table.answer(_config(1, 8, gas=3))
    assert once.metrics is not None and thrice.metrics is not None
    assert thrice.metrics.latency == pytest.approx(200 + 3 * 400)
    assert thrice.metrics.throughput == pytest.approx(24 / 1.4)
    assert thrice.metrics.step == once.metrics.step
    assert thrice.duration_s == pytest.approx(once.duration_s + 3 * 0.8)


def test_a_strategy_that_was_not_recorded_has_no_answer(table: Table) -> None:
    with pytest.raises(ValueError, match="z2_offload"):
        table.answer(_config(2, 1, offload_optimizer={"device": "cpu"}))


# -- tuners


class _Watched(Ledger):
    """Remembers what was asked."""

    def __init__(self, table: Table, max_trials: int) -> None:
        super().__init__(table, max_trials)
        self.asked: list[tuple[int, int, int]] = []

    def profile(self) -> Outcome:
        outcome = super().profile()
        self.asked.append((-1, 0, 0))
        return outcome

    def run(self, config: Any) -> Outcome:
        outcome = super().run(config)
        stage = config.get("zero_optimization", {}).get("stage", 0)
        size = config["train_micro_batch_size_per_gpu"]
        self.asked.append((stage, size, config["gradient_accumulation_steps"]))
        return outcome


def _asked(
    table: Table, name: str, seed: int = 1, max_trials: int = 30
) -> list[tuple[int, int, int]]:
    ledger = _Watched(table, max_trials)
    player(name)(ledger, seed, max_trials)
    assert len(ledger.asked) == len(ledger.outcomes) <= max_trials
    return ledger.asked


@pytest.mark.parametrize("name", PEERS)
def test_every_tuner_runs_and_finds_something(table: Table, name: str) -> None:
    episode = play(table, name, 1, 30)
    assert episode.best_after(30) > 0.6
    assert max(value for value in episode.values if value is not None) <= 1.0
    assert episode.slot_s > 0
    repeated = play(table, name, 1, 30)
    assert repeated.values == episode.values
    seeds = {play(table, name, seed, 30).values for seed in (1, 2, 3, 4)}
    assert (len(seeds) == 1) == (name in UNSEEDED)


@pytest.mark.parametrize("method", ["asha", "binary"])
def test_determined_begins_in_the_middle_of_its_own_prediction(table: Table, method: str) -> None:
    asked = _asked(table, f"Determined {method}")
    # 16 bytes for each parameter of a model in fp32, and one sample's activations.
    predicted = (SLOT_BYTES - 16 * PARAMS - SAMPLE_BYTES) // SAMPLE_BYTES
    assert asked[0] == (-1, 0, 0)
    assert asked[1][1:] == ((1 + predicted) // 2, 1)
    stage, size, _ = asked[1]
    assert asked[2][0] == stage
    assert asked[2][1] != size
    assert len(asked) == 30


def test_deepspeed_walks_through_the_stages_as_its_fast_mode_does(table: Table) -> None:
    asked = _asked(table, "DeepSpeed fast", max_trials=50)
    largest = table.largest_micro_batch
    assert asked[:3] == [(-1, 0, 0), (0, 1, 1), (0, largest, 1)]
    assert (0, largest // 2, 2) in asked, "half the micro batch, accumulated twice"
    assert len(asked) < 50


def test_deepspeed_stops_when_the_budget_is_spent(table: Table) -> None:
    assert len(_asked(table, "DeepSpeed fast", max_trials=3)) == 3


def test_optuna_keeps_to_the_space(table: Table) -> None:
    asked = _asked(table, "Optuna TPE", max_trials=40)
    assert {stage for stage, _, _ in asked} == {0, 1, 2, 3}
    assert all(1 <= size <= table.largest_micro_batch for _, size, _ in asked)


def test_a_ledger_ends_a_search_that_does_not_end_itself(table: Table) -> None:
    ledger = Ledger(table, 1)
    ledger.profile()
    with pytest.raises(BudgetSpent):
        ledger.run(_config(0, 1))


# -- what is made of it


def _episode(tuner: str, *values: float | None, seed: int = 0, oom: int = 0) -> Episode:
    return Episode("made-up", tuner, seed, values, oom, 10.0 * len(values), 0.1)


def test_summaries_count_trials_from_one() -> None:
    episodes = [
        _episode("dsat model", None, 0.5, 0.96, 0.995),
        _episode("dsat model", None, 0.9, None, 0.94, seed=1, oom=2),
        _episode("dsat model", None, 0.99, seed=2, oom=1),
    ]
    [summary] = summaries(episodes)
    assert summary.seeds == 3
    assert summary.median_after == (0.99, 0.99, 0.99, 0.99)
    assert summary.worst_after == (0.94, 0.94, 0.94, 0.94)
    assert summary.median_trials_to == (3, 4)
    assert summary.worst_trials_to == (math.inf, math.inf)
    assert (summary.within_10_of_99, summary.median_oom, summary.worst_oom) == (2, 1, 2)
    assert picture.medians(episodes)[:4] == [0.0, 0.9, 0.96, 0.99]


def _summary(tuner: str, **changes: Any) -> Summary:
    [summary] = summaries([_episode(tuner, None, 0.995, seed=seed) for seed in range(20)])
    return replace(summary, **changes)


def _bars(*found: Summary) -> dict[str, bool]:
    given = {summary.tuner: summary for summary in found}
    for family, late in (("dsat", 0.0), ("Determined", 5.0)):
        for method in ("asha", "binary", "random"):
            name = f"{family} {method}"
            given.setdefault(name, _summary(name, median_trials_to=(2 + late, 2 + late)))
    of_each = bars.of_replay(list(given.values()))
    return {" ".join(bar.text.replace("`", "").split()[:2]): bar.met for bar in of_each}


def test_bars_hold_on_every_table_or_not_at_all() -> None:
    met = _bars(_summary("dsat model", within_10_of_99=18))
    assert len(met) == 8
    assert all(met.values())
    assert not _bars()["model reaches"], "a search that does not exist"
    assert not _bars(_summary("dsat model", within_10_of_99=17))["model reaches"]
    worse = _summary("dsat asha", median_trials_to=(7.0, 7.0), worst_oom=2)
    met = _bars(_summary("dsat model"), worse)
    assert [name for name, holds in met.items() if not holds] == ["asha needs", "asha loses"]
    never = _summary("dsat random", median_trials_to=(math.inf, math.inf))
    assert not _bars(never)["random needs"]


def test_a_tuner_that_was_left_out_meets_no_bar() -> None:
    of_each = bars.of_replay([_summary("dsat asha", median_trials_to=(4.0, 4.0))])
    said = {" ".join(bar.text.replace("`", "").split()[:2]): bar.measured for bar in of_each}
    assert said["asha needs"] == "made-up 4 to -"
    assert said["binary needs"] == "made-up - to -"
    assert said["model reaches"] == said["model loses"] == "made-up -"
    assert [bar.text.split()[:2] for bar in of_each if bar.met] == [["`asha`", "loses"]]


def _tuned(name: str, wall_s: float, *throughputs: float) -> Tuned:
    config = _config(1, 4, reduce_bucket_size=10**6)
    return Tuned(name, f"{name} train.py", wall_s, 12, config, throughputs)


@pytest.mark.parametrize(
    ("wall_s", "throughput", "met"), [(10, 99, [True, True]), (11, 97, [False, False])]
)
def test_bars_of_the_real_comparison(wall_s: float, throughput: float, met: list[bool]) -> None:
    ours = _tuned("dsat", wall_s, 1, throughput, 1000)
    theirs = _tuned("deepspeed", 100, 90, 100, 110)
    assert [bar.met for bar in bars.of_native("short", ours, theirs)] == met


def _row(method: str, runs: int, **changes: Any) -> Row:
    one = Result(1.02, 1.02, True, 1.1, 1.02, True, 8, 0.2)
    return Row("steps 5 %", method, [replace(one, **changes)] * runs)


def test_bars_of_gains_hold_in_every_row_or_not_at_all() -> None:
    def met(*rows: Row) -> list[bool]:
        return [bar.met for bar in bars.of_curse(rows)]

    good = _row("asha", 100)
    assert met(good) == [True, True, True] and met() == []
    assert met(good, _row("model", 100, reported=1.04)) == [False, True, True]
    assert met(good, _row("model", 100, reported=1.0)) == [False, True, True]
    assert met(good, _row("model", 100, reported=0.9, true=0.9)) == [True, False, True]
    assert met(good, _row("model", 100, covered=False)) == [True, True, False]
    assert met(good, _row("model", 100, covered=None)) == [True, True, True]
    mixed = Row("steps 5 %", "binary", [*_row("", 92).results, *_row("", 8, covered=False).results])
    assert met(mixed) == [True, True, True], "100 runs cannot tell 92 % from 93 %"
    [bias, *_] = bars.of_curse([good, _row("model", 100, reported=1.04)])
    assert bias.measured == "steps 5 %, model: +2.00 points of 100 runs"


def test_the_bar_of_the_printed_command() -> None:
    near = Compared("a", 10.0, (100.0, 80.0, 90.0), (102.0, 40.0, 92.0))
    far = replace(near, name="b", by_hand=(104.0, 84.0, 94.0))
    [bar] = bars.of_by_hand([near])
    assert bar.met and bar.measured == "a 1.020"
    [bar] = bars.of_by_hand([near, far])
    assert not bar.met and bar.measured.endswith("b 1.044")


def test_the_report_says_what_was_measured(table: Table, tmp_path: Path) -> None:
    episodes = [
        _episode(name, None, 0.5, 1.0, seed=seed)
        for name in (*PEERS, "dsat model")
        for seed in range(2)
    ]
    about = {"machine": "2 cpu slots", "host": "2 cores", "date": "today", "torch": "2.0"}
    parts = {name: results.Part(f"{name} said this\n", about, 61.0) for name in results.COMMANDS}
    tuned = {
        "native": (_tuned("dsat", 9, 2), _tuned("deepspeed", 99, 2)),
        "native_16": (
            replace(_tuned("dsat", 8, 3), walls_s=(7, 8, 70)),
            _tuned("deepspeed", 16, 3),
        ),
    }
    text = results.report(parts, [table], episodes, tuned)
    assert "today, 2 cpu slots; 2 cores; torch 2.0; took 1 min 01 s." in text
    assert "scale said this" in text and "trial_start said this" in text
    assert "| Determined asha | 100.0% (100.0%) |" in text
    assert "| `dsat` | 9.0 s | 12 | stage 1, micro batch 4, gas 1 | 2.00 (2.00 to 2.00) |" in text
    assert "For real, sequences of 16 tokens: dsat" in text
    assert "| `dsat` | 8.0 s (7.0 s to 1 min 10 s) | 12 | stage 1, micro batch 4, gas 1 |" in text
    assert "for real, sequences of 128 tokens: at most" in text
    assert "| 8 s of 16 s: 0.50 | **missed** |" in text
    assert "| **missed** |" in text and "| met |" in text
    picture.draw(episodes, tmp_path / "one.svg")
    picture.draw(episodes, tmp_path / "two.svg")
    drawn = (tmp_path / "one.svg").read_bytes()
    assert drawn == (tmp_path / "two.svg").read_bytes()
    assert b"made-up" in drawn and len(drawn) < 150_000


def test_a_report_of_a_part_has_only_that_part(table: Table) -> None:
    part = results.Part("fast\n", {"machine": "m", "host": "h", "date": "today"}, 1.0)
    text = results.report({"scale": part}, [table], [], {})
    assert "Cost of a decision" in text
    assert "Replay" not in text and "For real" not in text
    both = _tuned("dsat", 8, 3), _tuned("deepspeed", 16, 3)
    text = results.report({"native_16": part}, [table], [], {"native_16": both})
    assert "16 tokens" in text and "128 tokens" not in text


def test_the_best_is_that_of_all_recorded_trials(table: Table) -> None:
    values = [row.outcome.value(OBJECTIVE) for row in table.rows]
    assert table.best(OBJECTIVE) == max(value for value in values if value is not None)
