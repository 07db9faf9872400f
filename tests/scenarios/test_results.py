"""What a run leaves: its files, the training command, exports and the values of the API."""

from __future__ import annotations

import csv
import json
import os
import sqlite3
import stat
import subprocess
import sys
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import dsat
from testing.scenarios import User
from testing.started import Told
from testing.world import Failure, World

MICRO = "train_micro_batch_size_per_gpu"
SECRETS = {  # by where they stand
    "variable": "hunter2-variable",
    "hyperparameter": "hunter3-hyperparameter",
    "argument": "hunter4-argument",
    "address": "hunter5-address",
    "configuration": "hunter6-configuration",
    "exception": "hunter7-exception",
}
FORMULAS = ("=HYPERLINK(1)", "+1", "-1", "@SUM(1)", "\tcut")
CONFIG = {
    MICRO: 1,
    "comet": {"enabled": False, "api_key": SECRETS["configuration"]},
    "tensorboard": {"enabled": False, "output_path": f"s3://me:{SECRETS['address']}@store/logs"},
}
SAID = f'ConnectionError: token={SECRETS["exception"]} was "refused",\n\U0001f600'


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[User, Told]:
    """Return a user with a finished search: some trials ran out of memory, others failed."""
    failures = [Failure("ERROR", {"trial": 3 + n}, text) for n, text in enumerate(FORMULAS)]
    failures += [Failure("OOM", {"micro_batch": list(range(2, 16))}, "out of memory")]
    failures += [Failure("ERROR", {"stage": 2}, SAID, SAID)]
    user = User(tmp_path_factory.mktemp("ran"), World(failures=tuple(failures)))
    user.has(
        CONFIG,
        entrypoint=f"torchrun --nproc_per_node 1 train.py --api-key {SECRETS['argument']}",
        hyperparameters={"deepspeed_config": "ds.json", "auth_token": SECRETS["hyperparameter"]},
        environment={"environment_variables": [f"HF_TOKEN={SECRETS['variable']}"]},
    )
    told = user.tunes("--max-trials", 40, method="random", experiment=True)
    assert told.status == 0, told.err
    return user, told


def export(ran: tuple[User, Told], to: str, path: Path) -> Path:
    output = path / f"out.{to}"
    told = ran[0].types("export", "run", "--to", to, "--output", output)
    assert told.status == 0 and told.out.strip() == str(output), told.err
    return output


def leaked(text: str) -> list[str]:
    return [where for where, secret in SECRETS.items() if secret in text]


def test_the_files_of_a_run(ran: tuple[User, Told]) -> None:
    user, told = ran
    result, best = told.json, told.best
    own, told_config = user.best_config(), result["best_ds_config"]
    secret = {"comet", "tensorboard"}
    assert {k: own[k] for k in own.keys() - secret} == {
        k: told_config[k] for k in told_config.keys() - secret
    }
    assert own.items() >= {MICRO: best[MICRO], "bf16": {"enabled": True}}.items()
    metrics = json.loads(user.reads("best_ds_metrics.json"))
    assert metrics["trial"] == best["name"]
    assert metrics["throughput"] == pytest.approx(result["best_value"], rel=0.02), "of a final"
    summary, page = user.reads("summary.md"), user.reads("report.html")
    for line in result["verdict"]:
        assert line in summary
    for row in told.trials:
        assert row["name"] in summary and f"trials/{row['name']}/stderr.log" in page
    line = json.loads(user.reads("status.json"))["train_line"]
    assert f"Train with it: `{line}`" in summary and line in told.err
    files = [path for path in (user.folder / "run").rglob("*") if "trials" not in path.parts]
    assert [str(path) for path in files if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_the_numbers_of_the_stages_add_up(ran: tuple[User, Told]) -> None:
    user, told = ran
    rows = [r for r in told.trials if r["kind"] in ("baseline", "search")]
    for stage in range(4):
        own = [row for row in rows if row["stage"] == stage]
        lost = [row["outcome"] for row in own]
        speeds = [r["metrics"]["throughput"] for r in own if r["metrics"]]
        best = f"{max(speeds):.4g} samples/s" if speeds else "-"
        cells = [stage, len(own), lost.count("OOM"), lost.count("ERROR"), best]
        line = " | ".join(map(str, cells))
        assert line in " ".join(user.reads("summary.md").split())
    assert {"OK", "OOM", "ERROR"} == {row["outcome"] for row in rows}
    assert f"trials: {len(told.trials)}" in told.err


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("deepspeed --num_gpus 1 train.py --deepspeed_config ds.json", "deepspeed --num_gpus 1"),
        ("TOKEN=abc python3 -O train.py --deepspeed_config ds.json", "torchrun python3 -O"),
    ],
)
def test_the_last_line_is_a_command_that_trains(
    user: User, tmp_path: Path, entrypoint: str, words: str
) -> None:
    """Typed in another folder, it starts the script by its launcher with the best configuration."""
    user.has(entrypoint=entrypoint)
    told = user.tunes("--max-trials", 6, method="random", experiment=True)
    line = told.err.splitlines()[-1].partition(": ")[2]
    (tmp_path / "bin").mkdir()
    for launcher in ("deepspeed", "torchrun"):
        stand_in = tmp_path / "bin" / launcher
        stand_in.write_text('#!/bin/bash\necho "$PWD" "$TOKEN" "$(basename $0)" "$@"\n')
        stand_in.chmod(0o755)
    environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TOKEN": "xyz"}
    done = subprocess.run(
        ["/bin/bash", "-c", line], cwd="/", env=environ, capture_output=True, text=True, check=True
    )
    said = done.stdout.split()
    assert said[0] == str(user.folder) and "abc" not in line
    assert [word for word in words.split() if word not in said] == []
    path = Path(said[said.index("--deepspeed_config") + 1])
    assert json.loads(path.read_text()) == told.json["best_ds_config"]


def test_stdout_is_the_result_and_nothing_else(ran: tuple[User, Told]) -> None:
    user, told = ran
    for words in (["--json"], ["--trials", "--json"], ["--trial", told.best["name"], "--json"]):
        shown = user.types("show", "run", *words)
        assert shown.err == "" and json.loads(shown.out)
    again = user.tunes("--max-trials", 40, "--resume", method="random", experiment=True)
    assert again.json == told.json


def test_the_api_reads_the_same_result(ran: tuple[User, Told]) -> None:
    user, told = ran
    result = dsat.load_run(user.folder / "run")
    assert result == dsat.load_run(user.folder / "run" / "journal.jsonl")
    for name in ("best", "best_value", "baseline", "gain", "stop_reason", "wall_s", "metric"):
        assert getattr(result, name) == told.json[name], name
    assert list(result.trials) == told.trials and result.best_config == user.best_config()
    assert str(result).splitlines() == told.json["verdict"]
    assert result.train_command is not None and result.train_command in told.err


def test_nothing_that_is_shown_has_a_secret(ran: tuple[User, Told], tmp_path: Path) -> None:
    user, told = ran
    failed = next(row["name"] for row in told.trials if row["message"].startswith("Connection"))
    for words in (
        ["show", "run"],
        ["show", "run", "--json"],
        ["show", "run", "--trials", "--json"],
        ["show", "run", "--trial", failed, "--json"],
        ["runs", ".", "--json"],
    ):
        shown = user.types(*words)
        assert shown.status == 0 and leaked(shown.out + shown.err) == [], words
    assert leaked(told.out + told.err) == []
    assert [name for name in ("report.html", "summary.md") if leaked(user.reads(name))] == []
    assert leaked(export(ran, "csv", tmp_path).read_text()) == []
    # The configuration for training contains them, and only its owner can read it.
    assert leaked(user.reads("best_ds_config.json")) == ["address", "configuration"]


def test_the_files_of_deepspeeds_own_autotuner(user: User) -> None:
    section = {"enabled": True, "tuner_num_trials": 6, "metric": "throughput", "fast": False}
    section |= {"results_dir": "autotuning_results", "exps_dir": "autotuning_exps"}
    user.has({MICRO: 1, "autotuning": section})
    told = user.types("tune", "--json", "train.py", "--deepspeed_config", "ds.json")
    results, experiments = (user.folder / f"autotuning_{name}" for name in ("results", "exps"))
    assert told.json["run_dir"] == "dsat_runs/train-1"
    optimal = json.loads((results / "ds_config_optimal.json").read_text())
    assert optimal == told.json["best_ds_config"] and "autotuning" not in optimal
    command = (results / "cmd_optimal.txt").read_text()
    assert command.strip() and "train.py" in command
    summary = (results / "summary.txt").read_text()
    cells = [cell.strip() for cell in summary.split("| global")[1].split("|")[1:4]]
    kinds = [row["kind"] for row in told.trials]
    count = len(kinds) - kinds.count("final")
    assert cells == [str(count), f"{told.json['best_value']:g}", told.best["name"]]
    found = {path.stem: json.loads(path.read_text()) for path in experiments.glob("*.json")}
    assert set(found) >= {row["name"] for row in told.trials}
    assert found[told.best["name"]]["ds_config"] == optimal
    assert found[told.best["name"]]["num_gpus"] == 1


def test_deepspeeds_command_file_has_dsats_command_where_only_dsat_can_train(user: User) -> None:
    user.has({MICRO: 1, "autotuning": {"enabled": True, "results_dir": "results"}})
    told = user.tunes("--max-trials", 4, method="random", experiment=True)
    command = (user.folder / "results" / "cmd_optimal.txt").read_text()
    assert "--run-full-experiment" in command and f"Train with it: {command}" in told.err


# -- exports, opened by the tools themselves


def test_no_text_of_a_table_is_a_formula(ran: tuple[User, Told], tmp_path: Path) -> None:
    with export(ran, "csv", tmp_path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [row["name"] for row in ran[1].trials]
    said = {row["message"] for row in rows if row["outcome"] == "ERROR"}
    assert said > {f"'{text}" for text in FORMULAS}, "a spreadsheet would compute them"
    best = [row for row in rows if row["is_best"] == "True"]
    assert [row["name"] for row in best] == [ran[1].best["name"]]
    assert best[0][f"config.{MICRO}"] == str(ran[1].best[MICRO])
    assert float(best[0]["metrics.throughput"]) == ran[1].best["metrics"]["throughput"]
    refused = ran[0].types("export", "run", "--to", "csv", "--output", tmp_path / "out.csv")
    assert refused.status == 2 and "out.csv" in refused.err, "nothing is overwritten"


@pytest.mark.slow
def test_a_study_is_read_by_optuna(ran: tuple[User, Told], tmp_path: Path) -> None:
    import optuna
    from sqlalchemy.engine import URL

    folder = tmp_path / "what? 100%3F"
    folder.mkdir()
    path = export(ran, "optuna", folder)
    assert [*tmp_path.rglob("*")] == [folder, path]
    storage = URL.create("sqlite", database=str(path)).render_as_string()
    study = optuna.load_study(study_name="run", storage=storage)
    trials = {trial.user_attrs["name"]: trial for trial in study.trials}
    assert set(trials) == {row["name"] for row in ran[1].trials}
    for row in ran[1].trials:
        trial, value = trials[row["name"]], row["metrics"] and row["metrics"]["throughput"]
        state = optuna.trial.TrialState.COMPLETE if value else optuna.trial.TrialState.FAIL
        assert (trial.state, trial.value) == (state, value)
        assert trial.duration is not None and trial.duration.total_seconds() > 29, "of the world"
        bucket = "reduce_bucket_size" in trial.params
        assert bucket <= (row["stage"] > 0), "a setting that a stage does not have"
    attrs = study.user_attrs
    assert (attrs["best_value"], attrs["gain"]) == (ran[1].json["best_value"], ran[1].json["gain"])
    assert attrs["verdict"].splitlines() == ran[1].json["verdict"]
    assert leaked(str(attrs)) == []
    with sqlite3.connect(path) as database:
        assert leaked("\n".join(database.iterdump())) == []


@pytest.mark.slow
def test_a_table_is_read_by_pandas(ran: tuple[User, Told], tmp_path: Path) -> None:
    import pandas

    table = pandas.read_parquet(export(ran, "parquet", tmp_path))
    assert list(table["name"]) == [row["name"] for row in ran[1].trials]
    assert set(FORMULAS) < set(table["message"]), "no spreadsheet reads them"
    frame = dsat.load_run(ran[0].folder / "run").to_pandas()
    assert frame["metrics.throughput"].max() == table["metrics.throughput"].max()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["optuna", "parquet", "tensorboard"])
def test_a_place_that_a_tool_cannot_name_is_refused(
    ran: tuple[User, Told], tmp_path: Path, to: str
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    told = ran[0].types("export", "run", "--to", to, "--output", folder / "out")
    assert told.status == 2 and "UTF-8" in told.err and "--output" in told.err
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_events_are_read_by_tensorboard(ran: tuple[User, Told], tmp_path: Path) -> None:
    folder = export(ran, "tensorboard", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        assert {path.name for path in folder.iterdir()} == {row["name"] for row in ran[1].trials}
        read = EventAccumulator(str(folder / ran[1].best["name"])).Reload()
        steps = [event.value for event in read.Scalars("step_ms")]
        [value] = [event.value for event in read.Scalars("throughput")]
    metrics = ran[1].best["metrics"]
    assert value == pytest.approx(metrics["throughput"], rel=1e-6)
    assert len(steps) == metrics["num_steps"]
    assert sum(steps) / len(steps) == pytest.approx(metrics["latency"], rel=1e-6)


@pytest.mark.nightly
def test_runs_are_read_by_mlflow(
    ran: tuple[User, Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `make setup` installs it beside the environment.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(sys.prefix) / "mlflow")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of mlflow's own imports
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{export(ran, 'mlflow', tmp_path)}")
        experiment: Any = client.get_experiment_by_name("run")
        found = {r.info.run_name: r for r in client.search_runs([experiment.experiment_id])}
    assert experiment.tags["best_value"] == str(ran[1].json["best_value"])
    assert set(found) == {row["name"] for row in ran[1].trials}
    for row in ran[1].trials:
        info, data = found[row["name"]].info, found[row["name"]].data
        assert info.status == ("FINISHED" if row["outcome"] == "OK" else "FAILED")
        assert info.end_time - info.start_time >= 30_000, "it began when the trial did"
        assert datetime.fromtimestamp(info.end_time / 1000) <= datetime.now()
        value = row["metrics"] and row["metrics"]["throughput"]
        assert data.metrics.get("throughput") == value
        assert data.tags["is_best"] == str(row["name"] == ran[1].best["name"])


@pytest.mark.slow
def test_a_batch_that_is_damaged_in_the_journal_is_exported_all_the_same(user: User) -> None:
    user.has()
    assert user.tunes("--max-trials", 6, method="random").status == 0
    journal = user.folder / "run" / "journal.jsonl"
    events = user.events()
    for event in events:
        if event["event"] == "proposed":
            event["trial"]["overrides"][MICRO] = False
    journal.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    told = user.types("export", "run", "--to", "optuna", "--output", "run.db")
    assert told.status == 0, told.err
