"""Secrets that a user planted wherever they may stand: nothing that is shown has them."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
import yaml

import dsat
from dsat.app import local
from dsat.app.prepare import Prepared
from dsat.cli import main
from dsat.engines.places import local as this_machine
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial
from testing.helpers import World, failed
from testing.local import PROGRAMS, cpu_machine
from testing.simulated import SimulatedEngine

# By where they stand.
SECRETS = {
    "variable": "hunter2-variable",
    "hyperparameter": "hunter3-hyperparameter",
    "argument": "hunter4-argument",
    "address": "hunter5-address",
    "configuration": "hunter6-configuration",
    "exception": "hunter7-exception",
}


class Talkative(World):
    """A machine on which some trials fail with a secret in their message."""

    def outcome(self, trial: Trial) -> Outcome:
        found = super().outcome(trial)
        if found.ok:
            return found
        return failed(found.kind, f"ConnectionError: token={SECRETS['exception']} was refused")


def planted(folder: Path) -> Path:
    """An experiment with all of them."""
    shutil.copytree(PROGRAMS / "tiny", folder)
    config = json.loads((folder / "ds_config.json").read_text())
    config["comet"] = {"enabled": False, "api_key": SECRETS["configuration"]}
    config["tensorboard"] = {
        "enabled": False,
        "output_path": f"s3://me:{SECRETS['address']}@store/logs",
    }
    (folder / "ds_config.json").write_text(json.dumps(config))
    path = folder / "deepspeed.yaml"
    experiment = yaml.safe_load(path.read_text())
    experiment["entrypoint"] += f" --api-key {SECRETS['argument']}"
    experiment["hyperparameters"]["auth_token"] = SECRETS["hyperparameter"]
    variables = [f"HF_TOKEN={SECRETS['variable']}"]
    experiment["environment"] = {"environment_variables": variables}
    path.write_text(yaml.safe_dump(experiment))
    return path


def leaked(text: str) -> list[str]:
    return [where for where, secret in SECRETS.items() if secret in text]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a search that knows of all of them, on a machine that does not exist."""
    monkeypatch.setattr(this_machine, "find_machine", lambda *_: cpu_machine(2))
    monkeypatch.setattr(local, "ENGINES", {})
    monkeypatch.chdir(tmp_path)

    def make(ready: Prepared, folder: Path) -> SimulatedEngine:
        slots = ready.plan.slots_per_trial
        return SimulatedEngine(Talkative().outcome, num_slots=slots, slots_per_trial=slots)

    dsat.register_engine("pretend", make)
    path = planted(tmp_path / "model")
    result = dsat.tune(path, method="random", engine="pretend", metric="throughput", max_trials=12)
    assert result.run_dir is not None and result.best_config is not None
    assert any("***" in row["message"] for row in result.trials)
    folder: Path = result.run_dir
    return folder


@pytest.mark.slow
def test_what_is_shown_has_no_secret(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert leaked(caplog.text) == []
    for name in ("report.html", "summary.md"):
        assert leaked((run_dir / name).read_text()) == [], name
    trial = next(iter(dsat.load_run(run_dir).trials))["name"]
    for words in (
        ["show", run_dir],
        ["show", run_dir, "--json"],
        ["show", run_dir, "--trials", "--json"],
        ["show", run_dir, "--trial", trial, "--json"],
        ["runs", run_dir.parent, "--json"],
        ["export", run_dir, "--to", "csv", "--output", tmp_path / "run.csv"],
        ["export", run_dir, "--to", "optuna", "--output", tmp_path / "run.db"],
    ):
        assert main.main([str(word) for word in words]) == 0, words
        told = capsys.readouterr()
        assert leaked(told.out + told.err) == [], words
    assert leaked((tmp_path / "run.csv").read_text()) == []
    with sqlite3.connect(tmp_path / "run.db") as database:
        assert leaked("\n".join(database.iterdump())) == []
    # What is to be trained with is for use, and for its owner alone.
    best = run_dir / "best_ds_config.json"
    assert leaked(best.read_text()) == ["address", "configuration"]
    assert best.stat().st_mode & 0o077 == 0 and run_dir.stat().st_mode & 0o077 == 0
