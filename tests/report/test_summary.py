"""What people and programs are told at the end of a run."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.report import format as fmt
from dsat.report import summary
from dsat.report.live_view import LiveView
from dsat.report.log_lines import Narrator
from dsat.report.run_view import RunView, TrialView
from dsat.space.plan import Plan
from dsat.tuning.run import Run
from dsat.values.outcome import MemoryUse, Outcome
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import World, failed, plan_of, profiled, ran

MIB = 2**20
OWN = BatchTriple(8, 4, 1)
BASE = {
    "optimizer": {"type": "Adam"},
    "autotuning": {"enabled": True},
    "zero_optimization": {"stage": 0},
}


def run_of(
    *tried: tuple[int, int, Outcome],
    plan: Plan | None = None,
    baseline: Outcome | None = None,
    base: Mapping[str, Any] = BASE,
    predicted_bytes: int | None = None,
    profile: Outcome | None = None,
) -> Run:
    """A run of the profile, perhaps the user's own configuration, and search trials.

    Built from the journal's events, as every run is.
    """
    plan = replace(plan or plan_of(), own_batch=OWN, slots_per_trial=2, base_config=base)
    start = {"event": "start", "plan": plan.to_json(), "info": {"name": "x", "machine": "2 slots"}}
    events: list[dict[str, Any]] = [start]

    def add(kind: TrialKind, stage: int, micro_batch: int, outcome: Outcome) -> None:
        number = len(events) // 2
        batch = BatchTriple(2 * micro_batch, micro_batch, 1)
        overrides: dict[str, Any] = batch.config()
        if kind is TrialKind.SEARCH:
            overrides["zero_optimization"] = {"stage": stage}
        predicted = predicted_bytes if kind is TrialKind.SEARCH else None
        trial = Trial(
            number, kind, f"t{number}", stage, batch, overrides, predicted_bytes=predicted
        )
        events.append({"event": "proposed", "trial": trial.to_json(), "elapsed_s": 0.0})
        finished = {"event": "finished", "trial_id": number, "outcome": outcome.to_json()}
        events.append({**finished, "elapsed_s": 10.0})

    add(TrialKind.PROFILE, 0, 1, profile or profiled(World.profile))
    if baseline is not None:
        add(TrialKind.BASELINE, 0, OWN.micro_batch, baseline)
    for stage, micro_batch, outcome in tried:
        add(TrialKind.SEARCH, stage, micro_batch, outcome)
    return Run(events)


def test_a_row_per_stage_without_the_profile() -> None:
    run = run_of(
        (1, 8, ran(120)),
        (1, 16, failed("OOM")),
        (1, 12, ran(150)),
        (3, 8, failed("HOST_OOM")),
        (3, 4, failed("ERROR")),
        baseline=ran(100),
    )
    rows = RunView.of(run).stages
    assert [(r.strategy, r.trials, r.out_of_memory, r.failed) for r in rows] == [
        ("z0", 1, 0, 0),
        ("z1", 3, 1, 0),
        ("z3", 2, 1, 1),
    ]
    assert [r.best.trial.name if r.best else None for r in rows] == ["t1", "t4", None]
    assert run.running_s == 70.0


def test_the_configuration_is_for_use_as_it_is(tmp_path: Path) -> None:
    run = run_of((1, 16, ran(150)), baseline=ran(100))
    summary.write_files(run, tmp_path, "train it")
    assert json.loads((tmp_path / "best_ds_config.json").read_text()) == {
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 1},
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 1,
    }
    metrics = json.loads((tmp_path / "best_ds_metrics.json").read_text())
    assert metrics["trial"] == "t2"
    assert metrics["throughput"] == 150
    text = (tmp_path / "summary.md").read_text()
    assert "| 1 | 1 | 0 | 0 | 150 samples/s | t2 |" in " ".join(text.split())
    assert "Train with it: `train it`" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best_ds_config.json",
        "best_ds_metrics.json",
        "summary.md",
    ]


def test_the_result_for_programs(tmp_path: Path) -> None:
    warned = replace(ran(150), warnings=("look",))
    told = RunView.of(run_of((1, 8, warned), (1, 9, warned), baseline=ran(100))).to_json(tmp_path)
    assert json.loads(json.dumps(told)) == told
    assert told["gain"] == 1.5
    assert told["best"]["name"] == "t2"
    assert told["baseline"]["metrics"]["throughput"] == 100
    assert told["warnings"] == ["look"]
    assert len(told["trials"]) == 4


def test_a_view_that_is_no_terminal_prints_the_result_without_colours() -> None:
    stream = io.StringIO()
    run = run_of((1, 8, ran(150)), baseline=ran(100))
    with LiveView(stream) as view:
        for trial in run.trials.values():
            view.ended(run, trial, run.outcomes[trial.id])
            view.waited(run)
        assert stream.getvalue() == ""
        view.show_result(run)
    said = stream.getvalue()
    assert "Use t2." in said
    assert "\x1b" not in said


def test_a_run_is_told_line_by_line_and_a_warning_once() -> None:
    warned = replace(ran(150), warnings=("look",))
    run = run_of((1, 8, warned), (1, 9, replace(warned, warnings=("look", "again"))))
    narrator, lines = Narrator(), []
    for trial in run.trials.values():
        lines += narrator.started(trial)
        lines += narrator.ended(run, trial, run.outcomes[trial.id])
    said = "\n".join([*lines, *narrator.search_began(run, None)])
    assert re.search(r"memory per slot \S+ GiB available, activations \S+ (MiB|KiB) per", said)
    assert "memory predictions are off" in said and "t1: 150 samples/s" in said
    found = [line for line in lines if line.startswith("warning")]
    assert [line.rpartition(": ")[2] for line in found] == ["look", "again"]


@pytest.mark.parametrize(
    ("own_limit", "used", "said"),
    [
        (
            False,
            MemoryUse(allocated_bytes={"step": 70}, context_bytes=30),
            ", median error 2.0 %, largest 2.0 % over 1 trial that ran",
        ),
        # A CPU's resident set is a lower bound.
        (True, MemoryUse(host_rss_bytes={"step": 60}, context_bytes=50), ""),
    ],
)
def test_an_error_of_predicted_memory_is_told_where_it_is_known(
    own_limit: bool, used: MemoryUse | None, said: str
) -> None:
    plan = plan_of(slot_memory_bytes=2**30 if own_limit else None)
    run = run_of((1, 8, replace(ran(120), memory=used)), plan=plan, predicted_bytes=102)
    assert [x for x in RunView.of(run).facts if "memory" in x] == [
        f"memory: predicted by formula{said}"
    ]


@pytest.mark.parametrize(
    ("own_limit", "memory", "used"),
    [
        (True, MemoryUse(allocated_bytes={"step": 100 * MIB}, context_bytes=50 * MIB), 100),
        (False, MemoryUse(allocated_bytes={"step": 100 * MIB}, context_bytes=50 * MIB), 150),
        (False, MemoryUse(), None),
    ],
)
def test_used_memory_is_told_as_it_was_predicted(
    own_limit: bool, memory: MemoryUse, used: int | None
) -> None:
    """Where the limit is all that a slot has, predictions count the context."""
    plan = plan_of(slot_memory_bytes=2**30 if own_limit else None)
    ended = replace(ran(120), memory=memory)
    run = run_of((1, 8, ended), plan=plan, predicted_bytes=102 * MIB)
    trial = run.trials[max(run.trials)]
    told = TrialView.of(run, trial).to_json()["used_bytes"]
    [line] = Narrator().ended(run, trial, run.outcomes[trial.id])
    if used is None:
        assert told is None and ", 102.0 MiB predicted, took" in line
    else:
        assert told == used * MIB and f", {used}.0 MiB used of 102.0 MiB predicted" in line


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("throughput", 1234.5, "1,234 samples/s"),
        ("FLOPS_per_gpu", 9.9999e11, "1 TFLOP/s per slot"),
        ("latency", 12.345, "12.35 ms"),
        ("step", None, "-"),
        ("FLOPS_per_gpu", 4.2e14, "420 TFLOP/s per slot"),
        ("tokens_per_second", 76_812.3, "76,812 tokens/s"),
    ],
)
def test_metrics_with_units(name: str, value: float | None, text: str) -> None:
    assert fmt.metric(name, value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.2 s"), (42.4, "42 s"), (190, "3 min 10 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert fmt.duration(seconds) == text
