"""Summaries, targets and the report of benchmark results."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import native, replay, winners_curse
from benchmarks.native import Tuned
from benchmarks.replay import Episode, Summary
from benchmarks.winners_curse import Result, Row
from tests.benchmarks.conftest import config_of

ROOT = Path(__file__).parents[2]


def _episode(tuner: str, *values: float | None, seed: int = 0, oom: int = 0) -> Episode:
    best = max(value for value in values if value is not None)
    slot_s = 10.0 * len(values)
    return Episode("made-up", tuner, seed, values, values, best, oom, 4, slot_s, 8.0)


def _met(*more: Summary) -> dict[str, bool]:
    """Return which targets are met if dsat's searches need two trials, and Determined's seven."""
    found = {s.tuner: s for s in more}
    for method in ("model", "asha", "binary", "random"):
        found.setdefault(f"dsat {method}", _summary(f"dsat {method}", 2))
        found.setdefault(f"Determined {method}", _summary(f"Determined {method}", 7))
    told = replay.bars(list(found.values()))
    return {" ".join(bar.text.replace("`", "").split()[:2]): bar.met for bar in told}


def _summary(tuner: str, trials: int, *, oom: int = 0, good: int = 20) -> Summary:
    lines = [[0.1] * (trials - 1) + [0.995 if seed < good else 0.9] for seed in range(20)]
    found = [_episode(tuner, *line, seed=n, oom=oom) for n, line in enumerate(lines)]
    return Summary("made-up", tuner, found)


def test_bars_hold_on_every_table_or_not_at_all() -> None:
    assert len(_met()) == 8 and all(_met().values())
    assert _met(_summary("dsat model", 2, good=18))["model reaches"]
    assert not _met(_summary("dsat model", 2, good=17))["model reaches"]
    assert not _met(_summary("dsat model", 11))["model reaches"]
    missed = [name for name, met in _met(_summary("dsat asha", 7, oom=2)).items() if not met]
    assert missed == ["asha needs", "asha loses"]
    assert not _met(_summary("dsat random", 2, good=0))["random needs"]
    elsewhere = replace(_summary("dsat asha", 2, oom=2), table="another")
    [loses] = replay.bars([_summary("dsat asha", 2), elsewhere])
    assert (loses.met, loses.measured) == (False, "made-up 0; another 2")


def _row(method: str, runs: int, **changes: Any) -> Row:
    one = Result(1.02, 1.02, True, 1.1, 1.02, True, 8, 0.2)
    return Row("steps 5 %", method, [replace(one, **changes)] * runs)


def test_bars_of_gains_hold_in_every_row_or_not_at_all() -> None:
    def met(*rows: Row) -> list[bool]:
        return [bar.met for bar in winners_curse.bars(rows)]

    good = _row("asha", 100)
    assert met(good) == [True, True, True] and met() == []
    assert met(good, _row("model", 100, reported=1.04)) == [False, True, True]
    assert met(good, _row("model", 100, reported=1.0)) == [False, True, True]
    assert met(good, _row("model", 100, reported=0.9, true=0.9)) == [True, False, True]
    assert met(good, _row("model", 100, covered=False)) == [True, True, False]
    assert met(good, _row("model", 100, covered=None)) == [True, True, True]
    mixed = Row("steps 5 %", "binary", [*_row("", 92).results, *_row("", 8, covered=False).results])
    assert met(mixed) == [True, True, True], "100 runs cannot tell 92 % from 93 %"
    [bias, *_] = winners_curse.bars([good, _row("model", 100, reported=1.04)])
    assert bias.measured == "steps 5 %, model: +2.00 points of 100 runs"


def test_the_native_autotuner_is_compared_by_wall_time_and_by_one_stopwatch() -> None:
    config = config_of(1, 4, reduce_bucket_size=10**6)
    ours = Tuned("dsat tune", 8.0, 12, config, (3.0,), walls_s=(7.0, 8.0, 70.0))
    assert ours.cells()[1] == "8.0 s (7.0 s to 1 min 10 s)"
    for wall_s, throughput, met in ((32.0, 3.0, True), (16.0, 3.2, False)):
        theirs = Tuned("deepspeed", wall_s, 8, config, (throughput,))
        assert [bar.met for bar in native.bars(16, ours, theirs)] == [met, met]


def test_the_page_of_costs_has_the_figures_of_the_replay() -> None:
    hours: dict[str, list[str]] = {}
    for line in (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in ("dsat model", "dsat asha") and len(cells) == 14:
            hours.setdefault(cells[0], []).append(f"{float(cells[12]) / 3600:.1f}")
    page = (ROOT / "docs" / "cost.md").read_text()
    rows = re.findall(r"^\| .* GiB \|.*\| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 8
    for model, asha in rows:
        assert (model, asha) in zip(hours["dsat model"], hours["dsat asha"], strict=True)
