"""A run as a file that may be given away."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.app import shared_runs
from dsat.errors import UserInputError
from dsat.report import share
from dsat.report.run_view import RunView
from dsat.report.share import SharedRun
from dsat.tuning.replay import as_begun
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial
from testing.made_up_runs import Steady, run_of_world

PRIVATE = "alice-of-acme"
INFO = {"name": PRIVATE, "config": f"/home/{PRIVATE}/ds.json", "device": "NVIDIA H100"}


class Talkative(Steady):
    """Says private things wherever a script can."""

    def outcome(self, trial: Trial) -> Outcome:
        return replace(super().outcome(trial), message=PRIVATE, detail=PRIVATE, warnings=(PRIVATE,))


@pytest.fixture(scope="module")
def run() -> Run:
    run = run_of_world(Talkative(), method="random", finals=None, trials=30)
    run.info = INFO
    assert run.plan is not None
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
    assert {"OK", "OOM"} <= {trial.outcome.value for trial in shared.trials}


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
    ],
)
def test_other_files_are_refused(
    run: Run, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    data = {**SharedRun.of(RunView.of(run)).to_json(), **change}
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(UserInputError, match=said):
        share.read(tmp_path / "run.json")


def test_runs_on_the_same_devices_are_priors_of_the_model_of_speed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert shared_runs.priors("cuda", "NVIDIA H100") == {}
    known = {"compute": (3.0, 0.1), "link": (1.0, 0.2), "latency": (0.3, 0.99)}
    shared = replace(SharedRun.of(RunView.of(run)), accelerator="cuda", terms=known)
    share.write(shared, tmp_path / "run.json")
    share.write(replace(shared, terms={"link": (2.0, 0.2)}), tmp_path / "other.json")
    shared_runs.take_in([tmp_path / "run.json", tmp_path / "other.json"])
    found = shared_runs.priors("cuda", "NVIDIA H100")
    assert set(found) == {"link"}, "the term that the trials determined, but for the unit of all"
    assert list(found["link"]) == pytest.approx([1.5, 0.5])
    assert shared_runs.priors("cuda", "NVIDIA A100") == {}


def test_a_run_goes_on_with_the_priors_that_it_began_with(run: Run) -> None:
    assert run.plan is not None
    begun = replace(run.plan, priors={"link": (1.5, 0.5)})
    events = [{"event": "start", "plan": begun.to_json(), "info": {}}]
    assert as_begun(run.plan, events).difference(begun) is None
