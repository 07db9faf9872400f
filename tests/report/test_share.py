"""A run as a file that may be given away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.app import shared_runs
from dsat.errors import UserInputError
from dsat.inputs.settings import NO_MEMORY_MODEL
from dsat.inputs.switches import ATTENTION
from dsat.report import format as fmt
from dsat.report import share
from dsat.report.run_view import RunView
from dsat.report.share import SharedRun
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.replay import as_begun
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Outcome, OwnOptimizer, ScriptSwitch
from dsat.values.trial import Trial, TrialKind
from testing.helpers import FakeClock, drive, plan_of
from testing.made_up_runs import Steady, run_of_world

PRIVATE = "alice-of-acme"
INFO = {"name": PRIVATE, "config": f"/home/{PRIVATE}/ds.json", "device": "NVIDIA H100"}


class Talkative(Steady):
    """Says private things wherever a script can."""

    kernels = ScriptSwitch(("sdpa", f"{PRIVATE}/kernel"))
    optimizer = OwnOptimizer(PRIVATE, by_element=False)
    profile = replace(Steady.profile, switches={ATTENTION: kernels}, optimizer=optimizer)

    def outcome(self, trial: Trial) -> Outcome:
        return replace(super().outcome(trial), message=PRIVATE, detail=PRIVATE, warnings=(PRIVATE,))


@pytest.fixture(scope="module")
def run() -> Run:
    run = run_of_world(Talkative(), method="random", finals=None, trials=30)
    run.info = INFO
    private: dict[str, Any] = {
        "wandb": {"enabled": True, "project": PRIVATE},
        "tensorboard": {"output_path": f"/home/{PRIVATE}"},
        "zero_optimization": {"stage": 1, "offload_param": {"nvme_path": f"/{PRIVATE}"}},
        "optimizer": {"type": f"{PRIVATE}/adam", "params": {"lr": 0.5}},
    }
    run.plan = replace(run.plan, base_config={**run.plan.base_config, **private})
    return run


def test_it_holds_measurements_and_nothing_that_tells_whose_they_are(run: Run) -> None:
    shared = SharedRun.of(RunView.of(run))
    text = share.text_of(shared)
    assert PRIVATE not in text and "/home" not in text and '"lr"' not in text
    assert run.best is not None and shared.best is not None
    best, metrics = shared.trials[shared.best], run.outcomes[run.best.id].metrics
    assert metrics is not None and best.metrics == metrics
    assert best.config["train_micro_batch_size_per_gpu"] == run.best.batch.micro_batch
    assert shared.device == "NVIDIA H100"
    confirmed = fmt.metric("throughput", run.best_value)
    assert [row[4] for row in share.table([shared]).rows] == [confirmed]
    assert metrics.throughput != run.best_value
    assert {"OK", "OOM"} <= {trial.outcome.value for trial in shared.trials}


def test_every_key_is_in_the_documentation(run: Run) -> None:
    text = (Path(__file__).parents[2] / "docs" / "sharing.md").read_text()

    def keys(value: Any) -> Iterator[str]:
        for key, below in value.items() if isinstance(value, dict) else ():
            yield key
            if key not in ("config", "switches"):  # by names of settings
                yield from keys(below[0] if isinstance(below, list) else below)

    data = SharedRun.of(RunView.of(run)).to_json()
    measured = next(t for t in data["trials"] if t["metrics"])
    assert [key for key in keys({**data, "trials": [measured]}) if f"`{key}`" not in text] == []


def test_it_is_read_again_and_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shared, path = SharedRun.of(RunView.of(run)), tmp_path / "run.json"
    share.write(shared, path)
    assert share.read(path) == shared
    with pytest.raises(UserInputError, match="exists already"):
        share.write(shared, path)
    assert shared_runs.take_in([path, path]) == [shared, shared]
    assert shared_runs.shared() == [shared], "once"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "other"}, "is not a shared run"),
        ({"version": 99}, "has version 99 of the format"),
        ({"best": 10**6}, "best is no position in trials"),
        ({"metric": 3}, "metric must be a text"),
        ({"metric": "goodput"}, "metric is unknown"),
        ({"device": "\x1b]0;x\x07H100"}, "a name holds what is no name"),
    ],
)
def test_other_files_are_refused(
    run: Run, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    data = {**SharedRun.of(RunView.of(run)).to_json(), **change}
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(UserInputError, match=said):
        share.read(tmp_path / "run.json")


def test_what_others_found_for_the_same_model_is_tried_first(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run.best is not None
    slots = run.plan.slots_per_trial
    assert shared_runs.suggestions("", "NVIDIA H100", slots) == ()
    share.write(SharedRun.of(RunView.of(run)), tmp_path / "run.json")
    shared_runs.take_in([tmp_path / "run.json"])
    (tmp_path / "cache" / "dsat" / "shared" / "newer.json").write_text('{"version": 9}')
    assert shared_runs.suggestions("", "NVIDIA A100", slots) == ()
    [found] = shared_runs.suggestions("", "NVIDIA H100", slots)
    for model, same in ((found, True), (replace(found, num_params=1), False)):
        plan = plan_of("random", max_trials=12, suggested=(model,), memory_model=NO_MEMORY_MODEL)
        journal = MemoryJournal()
        drive(Tuner(plan, journal, info={}, clock=FakeClock()), Talkative(), slots=2)
        tried = [t for t in Run(journal.events).trials.values() if t.kind is TrialKind.SEARCH]
        best = (run.best.strategy, run.best.batch, run.best.overrides)
        assert ((tried[0].strategy, tried[0].batch, tried[0].overrides) == best) is same
        resumed = Tuner(plan, MemoryJournal(), info={}, events=journal.events, clock=FakeClock())
        assert resumed.run.trials == Run(journal.events).trials
        today = replace(plan, suggested=())
        assert as_begun(today, journal.events).suggested == plan.suggested
