"""Whatever the user writes wrong gets one clear line and exit status 2, before anything is run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsat.app import installed_deepspeed, local, source
from dsat.cli import main
from dsat.engines.places import local as this_machine
from dsat.values import slow
from testing.local import PROGRAMS, cpu_machine
from testing.made_up_runs import Steady, write_run

Folder = Path
STAMP = installed_deepspeed._stamp


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A working example in a folder of its own, which is the current one."""
    for path in (PROGRAMS / "tiny").iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slow, "LONG_S", 60.0)  # DeepSpeed may be asked something new
    monkeypatch.setattr(this_machine, "find_machine", lambda *_: cpu_machine(2))
    monkeypatch.setattr(installed_deepspeed, "_stamp", lambda: None)  # it takes seconds to ask
    monkeypatch.setattr(local, "LocalEngine", _no_engine)  # nothing is ever run
    monkeypatch.setattr(source, "FirstRun", _no_engine)
    return tmp_path


def _no_engine(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("trials would be run")


def edit(folder: Folder, experiment: Mapping[str, Any] = {}, **config: Any) -> None:
    """Change keys of the experiment and of its DeepSpeed configuration."""
    path = folder / "deepspeed.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **experiment}))
    path = folder / "ds_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


HPARAMS = {"deepspeed_config": "ds_config.json"}
BY_DEEPSPEED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"zero_optimization": {"stage": 1, "reduce_bucket": 10**6}},
        ["ds_config.json: zero_optimization.reduce_bucket:", "no setting", "'reduce_bucket_size'"],
    ),
    (
        {"zero_optimization": {"stage": 2, "overlap_comm": [True, "often"]}},
        ["ds_config.json: zero_optimization.overlap_comm:", "must be a valid boolean", "'often'"],
    ),
    (
        {
            "experiment": {
                "hyperparameters": {
                    **HPARAMS,
                    "overwrite_deepspeed_args": {"gradient_cliping": 1},
                }
            }
        },
        ["overwrite_deepspeed_args.gradient_cliping", "gradient_clipping"],
    ),
]


@pytest.mark.slow  # imports DeepSpeed
@pytest.mark.parametrize(
    ("changes", "expected"),  # all problems, in one process: tests/in_trial/test_config_check.py
    [
        pytest.param(*case, marks=pytest.mark.nightly if number else [])
        for number, case in enumerate(BY_DEEPSPEED)
    ],
)
def test_settings_that_deepspeed_refuses(
    folder: Folder,
    changes: dict[str, Any],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(installed_deepspeed, "_stamp", STAMP)
    edit(folder, **changes)
    assert main.main(["asha", "deepspeed.yaml", "."]) == 2
    check_one_line(capsys.readouterr(), expected)


SCRIPT = ["train.py", "--deepspeed_config", "ds_config.json"]


def test_a_run_of_other_options(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(folder / "run", Steady(), trials=3)
    assert main.main(["asha", "deepspeed.yaml", ".", "--run-dir", "run", "--resume"]) == 2
    assert "dsat: error: Cannot resume: " in capsys.readouterr().err


def check_one_line(captured: Any, expected: list[str]) -> None:
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("dsat: error: ")
    for part in expected:
        assert part in lines[0]
    assert captured.out == ""


def test_dry_run_tells_the_plan_and_leaves_nothing(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert main.main(["asha", "deepspeed.yaml", ".", "--dry-run"]) == 0
    said = capsys.readouterr().out
    for part in ("asha", "FLOPS_per_gpu", "reduce_bucket_size", "train.py", "trial 0", "stage 3"):
        assert part in said
    assert sorted(folder.rglob("*")) == before


def test_dry_run_as_json(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["binary", "deepspeed.yaml", ".", "--dry-run", "--json", "--train-batch-size", "8"]
    assert main.main(argv) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plan"]["train_batch_size"] == 8
    assert told["plan"]["own_batch"] == _batch(8, 4, 1)
    assert told["plan"]["measured"]["device"] == "test"
    assert told["first_trial"]["kind"] == "baseline"
    assert told["command"][-1] == "train.py"


@pytest.mark.parametrize(
    ("config", "options", "kept"),
    [
        ({"train_batch_size": 16, "gradient_accumulation_steps": 4}, "", 16),
        ({"train_batch_size": 16}, "--train-batch-size any", None),
        ({"train_batch_size": 16}, "--max-train-batch-size 64", None),
        ({"train_batch_size": 16}, "--train-batch-size 8", 8),
        ({"train_micro_batch_size_per_gpu": 4}, "", None),
        ({"train_micro_batch_size_per_gpu": 4}, "--train-batch-size own", 8),
    ],
)
def test_a_global_batch_that_the_configuration_gives_is_kept(
    config: dict[str, int],
    options: str,
    kept: int | None,
    folder: Folder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "ds_config.json").write_text(json.dumps(config))
    argv = ["binary", "deepspeed.yaml", ".", "--dry-run", "--json", *options.split()]
    assert main.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["train_batch_size"] == kept


def test_auto_stands_for_the_trainers_flags(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    (folder / "ds_config.json").write_text(json.dumps(auto))
    argv = ["asha", "deepspeed.yaml", ".", "--dry-run", "--json"]
    command = "deepspeed train.py --deepspeed ds_config.json --output_dir out"
    for flags, micro_batch, gas in (
        ("", 8, 1),
        ("--per-device-train-batch-size=3 --gradient_accumulation_steps 2", 3, 2),
    ):
        edit(folder, {"entrypoint": f"{command} {flags}"})
        assert main.main(argv) == 0
        own = json.loads(capsys.readouterr().out)["plan"]["own_batch"]
        assert own == _batch(micro_batch * gas * 2, micro_batch, gas)


def _batch(total: int, micro_batch: int, gas: int) -> dict[str, Any]:
    """The batch sizes of slots that are not divided."""
    sizes = {"train_batch_size": total, "micro_batch": micro_batch, "gas": gas}
    return {**sizes, "parallelism": {"tensor": 1, "sequence": 1}}


@pytest.mark.parametrize("key", ["metric", "max_length"])
def test_a_trial_class_cannot_be_trained_to_no_end(
    folder: Folder, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 9}}
    del searcher[key]
    trial = "python3 -m determined.launch.deepspeed --trial model_def:Mine"
    edit(folder, {"entrypoint": trial, "searcher": searcher})
    assert main.main(["asha", "deepspeed.yaml", ".", "--run-full-experiment"]) == 2
    check_one_line(capsys.readouterr(), ["deepspeed.yaml: searcher", f"there is no {key}"])
    assert main.main(["asha", "deepspeed.yaml", ".", "--dry-run"]) == 0


def test_a_script_may_have_the_name_of_a_library(tmp_path: Path) -> None:
    for name in ("rich.py", "wrapt.py"):
        (tmp_path / name).write_text("raise SystemExit('the script was run')\n")
    (tmp_path / "deepspeed.yaml").write_text("a: [")
    command = [sys.executable, "-m", "dsat", "asha", "deepspeed.yaml", "."]
    root = str(Path(__file__).parents[2])
    process = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert process.stderr.startswith("dsat: error: deepspeed.yaml: is not valid YAML")
    assert len(process.stderr.splitlines()) == 1, "the script was run"
