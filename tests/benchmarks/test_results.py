"""What is made of the figures: summaries, bars and the report."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bars, picture, results
from benchmarks.native import Tuned
from benchmarks.peers import PEERS
from benchmarks.replay import Episode, Summary, summaries
from benchmarks.tables import Table
from benchmarks.winners_curse import Result, Row
from tests.benchmarks.made_up_table import (
    config_of,
)


def _episode(tuner: str, *values: float | None, seed: int = 0, oom: int = 0) -> Episode:
    best = max(value for value in values if value is not None)
    slot_s = 10.0 * len(values)
    return Episode("made-up", tuner, seed, values, values, best, oom, 4, slot_s, 8.0, 0.1)


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
    assert (summary.median_recommended, summary.worst_recommended) == (0.99, 0.94)
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


def _tuned(name: str, wall_s: float, *throughputs: float) -> Tuned:
    config = config_of(1, 4, reduce_bucket_size=10**6)
    return Tuned(name, f"{name} train.py", wall_s, 12, config, throughputs)


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


@pytest.mark.slow
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
    drawn = (tmp_path / "one.svg").read_bytes()
    assert b"made-up" in drawn and len(drawn) < 150_000
