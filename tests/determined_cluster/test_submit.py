"""The command towards a cluster: what it refuses in one line, what it submits."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from dsat import api as dsat_api
from dsat.cli import main
from dsat.cli.settings_from_argv import parse
from dsat.determined_cluster import client, result, submit
from dsat.errors import UserInputError
from dsat.inputs.ds_config import DSAT_TRIAL_KEY
from dsat.inputs.settings import Settings
from testing.local import PROGRAMS
from testing.master import StandIn
from testing.master.states import State
from testing.on_cluster import changed

PRETEND = PROGRAMS / "pretend"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A master that is configured for this process, with no slots that would run anything."""
    with StandIn(tmp_path / "master", nodes=(1,)) as found:
        configure(found, tmp_path, monkeypatch)
        yield found


def configure(found: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in found.client_environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)


def dsat(*options: object, model: Path = PRETEND) -> int:
    words = ["random", model / "deepspeed.yaml", model, "--metric", "throughput", *options]
    return main.main(list(map(str, words)))


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command ended with."""
    err = capsys.readouterr().err
    assert err.startswith("dsat: error: ") and err.count("\n") == 1, err
    return err


def test_a_search_is_submitted_from_python(
    master: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PRETEND / "deepspeed.yaml"
    result = dsat_api.tune(config, method="random", metric="throughput", detach=True)
    assert (result.run_dir, result.best) == (None, None)
    assert result.url == f"{master.url}/det/experiments/1"
    assert capsys.readouterr() == ("", "")
    with pytest.raises(UserInputError, match="--cold: is for trials on this machine"):
        dsat_api.tune(config, engine="determined", cold=True)


def test_a_trial_on_the_cluster_submits_nothing(
    master: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = SimpleNamespace(hparams={DSAT_TRIAL_KEY: {}})
    info = SimpleNamespace(task_type="TRIAL", trial=trial)
    monkeypatch.setattr("determined.get_cluster_info", lambda: info)
    with pytest.raises(UserInputError, match="inside a trial"):
        dsat_api.tune(PRETEND / "deepspeed.yaml", metric="throughput", detach=True)
    assert master.experiments == []


def test_the_search_is_submitted_where_the_user_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = yaml.safe_load((PRETEND / "deepspeed.yaml").read_text())
    model = tmp_path / "model"
    model.mkdir()
    (model / "train.py").write_text("import dsat\n")
    (model / "notes.bin").write_text("x")
    (model / ".detignore").write_text("*.bin\n")
    environment = {"environment_variables": ["TOKEN=hunter2"]}
    mine = {"workspace": "Vision", "project": "nets", "labels": ["x"], "environment": environment}
    (model / "deepspeed.yaml").write_text(yaml.safe_dump({**data, **mine}))
    changes = tmp_path / "runner.yaml"
    changes.write_text("resources: {resource_pool: default, priority: 50}\n")
    with StandIn(tmp_path / "master", nodes=(1,), projects=[("Vision", "nets")]) as master:
        configure(master, tmp_path, monkeypatch)
        options = ("--max-search-runner-restarts", 2, "--search-runner-config", changes)
        assert dsat(*options, "--detach", "--json", model=model) == 0
        told = capsys.readouterr()
        assert f'"url": "{master.url}/det/experiments/1"' in told.out
        assert "DET_MASTER is set" in told.err and "Created experiment 1" in told.err
        config = master.experiment(1).config
        assert (config["workspace"], config["project"]) == ("Vision", "nets")
        assert config["labels"] == ["x"]
        assert config["name"] == "(DSAT) pretend" and config["max_restarts"] == 2
        assert config["resources"]["slots_per_trial"] == 0
        assert config["resources"]["priority"] == 50
        assert config["environment"]["environment_variables"] == ["TOKEN=hunter2"]
        files = {name.rstrip("/") for name in master.context_files(1)}
        assert {
            "dsat_job.json",
            "dsat/in_trial/cluster_rank.py",
            "model/train.py",
            "model/deepspeed.yaml",
        } <= files
        assert "model/notes.bin" not in files


def test_a_search_is_followed_again(
    master: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After Ctrl-C or --detach, from any process: to its end, with its result files."""
    monkeypatch.chdir(tmp_path)
    assert dsat("--detach") == 0
    assert "Follow it: dsat watch 1" in capsys.readouterr().out
    told = {"over": True, "best": {"name": "z1"}, "files": {"best_ds_config.json": "{}"}}
    master.experiment(1).state = State.COMPLETED
    lines = result.to_lines(told)
    monkeypatch.setattr(client, "_runner_lines", lambda *_: ["measured z1", *lines])
    assert main.main(["watch", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["experiment_id"], found["state"]) == (1, "COMPLETED")
    assert (Path(found["run_dir"]) / "best_ds_config.json").read_text() == "{}"
    assert Path(found["run_dir"]).name.startswith("pretend")
    assert main.main(["watch", "2"]) == 2
    assert master.url in refused(capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (401, "does not accept your credentials"),
        (502, "no Determined master answers there"),
    ],
)
def test_a_master_that_no_longer_lets_follow(
    status: int,
    problem: str,
    master: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The search goes on; the user learns how to follow it again."""
    monkeypatch.setattr("dsat.determined_cluster.master.patience_s", lambda error: 0.0)
    master.fault(r"GET .*/experiments/1$", status=status, times=None, after=1)
    assert dsat() == 2
    told = capsys.readouterr()
    assert problem in told.err and "Traceback" not in told.err
    assert "no longer followed" in told.out and "dsat watch 1" in told.out


@pytest.mark.usefixtures("master")
@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("DET_PASS", "wrong", "does not accept your credentials"),
        ("DET_MASTER", NOWHERE, "no Determined master answers there"),
        ("DET_MASTER", "ftp://x:y:z", "no Determined master answers there"),
    ],
)
def test_a_master_that_is_not_there_for_the_user(
    variable: str,
    value: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert dsat() == 2
    err = refused(capsys)
    assert said in err and ("--engine local" in err) is (variable == "DET_MASTER")


def test_a_master_without_custom_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with StandIn(tmp_path / "master", version="0.38.1-rc2") as master:
        configure(master, tmp_path, monkeypatch)
        assert dsat() == 2
        err = refused(capsys)
        assert "gone since 0.38" in err and "--engine local" in err
        assert master.experiments == []


def test_a_determined_without_custom_searches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DET_MASTER", NOWHERE)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name.endswith(".searcher") else found(name)
    )
    assert dsat() == 2
    assert "the installed determined has no custom searchers" in refused(capsys)


def test_a_limit_of_slots_in_the_experiment_is_the_searchs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DET_MASTER", NOWHERE)
    model = changed("pretend", tmp_path, resources={"slots_per_trial": 2, "max_slots": 4})
    words = ["random", model / "deepspeed.yaml", model, "--metric", "throughput"]

    def limit(*options: str) -> tuple[int | None, int]:
        settings = parse([*map(str, words), *options])
        assert isinstance(settings, Settings)
        job = submit.prepare(settings, submit.where(settings)).job
        return job.max_slots, job.num_slots

    assert limit() == (4, 4)
    assert limit("--max-slots", "2") == (2, 2)
    assert dsat("--slots", 5, model=model) == 2
    assert "resources.max_slots: 4 is less than the 5 slots" in refused(capsys)


def test_a_project_that_does_not_exist(
    master: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = tmp_path / "runner.yaml"
    changes.write_text("workspace: Nowhere\nproject: none\n")
    assert dsat("--search-runner-config", changes) == 2
    assert "the master refuses" in refused(capsys)


@pytest.mark.parametrize(
    "options",
    [
        ["--cold"],
        ["--resume"],
        ["--run-dir", "x"],
        ["--arg-mapping", "train_micro_batch_size_per_gpu=--b"],
        ["--switch", "--workers=0,2"],
    ],
)
def test_what_is_for_this_machine_only(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DET_MASTER", NOWHERE)
    for engine in ("determined", "auto"):
        assert dsat("--engine", engine, *options) == 2
        assert f"{options[0]}: is for trials on this machine" in refused(capsys)


def test_a_command_stays_on_this_machine_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DET_MASTER", NOWHERE)
    settings = Settings(method="random", command=("python3", "train.py"))
    with caplog.at_level("INFO"):
        assert submit.where(settings).master is None
    assert "tuning on this machine" in caplog.text and "though DET_MASTER is set" in caplog.text


def test_the_plan_is_shown_without_asking_anybody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DET_MASTER", NOWHERE)
    assert dsat("--dry-run") == 0
    out = capsys.readouterr().out
    for fact in ("random search, optimising throughput", "stage 1", "to upload: "):
        assert fact in out
