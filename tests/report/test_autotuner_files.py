"""The files that people look for after `deepspeed --autotuning`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsat.errors import UserInputError
from dsat.report import autotuner_files
from dsat.report.run_view import RunView
from dsat.report.table import Table
from dsat.tuning.run import Run
from testing.helpers import failed, ran
from testing.made_up_runs import Steady, run_of_world
from tests.report.test_summary import run_of

COMMAND = "OMP_NUM_THREADS=1 deepspeed train.py --name 'my run' --deepspeed_config ds.json"


def named(run: Run, **strategies: str) -> Run:
    """The run with its trials (`t2`) told to be of other strategies (`z2_offload`)."""
    for number, trial in run.trials.items():
        if trial.name in strategies:
            run.trials[number] = replace(trial, strategy=strategies[trial.name])
    return run


def test_the_summary_is_laid_out_as_natively() -> None:
    run = run_of(
        (1, 3, ran(187.29812)),
        (1, 4, failed("OOM")),
        (3, 3, failed("ERROR")),
        (0, 2, ran(90.1269)),
        (2, 3, ran(1.5e13)),
        (2, 3, ran(148.154)),
        baseline=ran(60),
    )
    # What tabulate 0.10 makes of it in its "pipe" format, but that numbers end together.
    assert autotuner_files.summary_text(RunView.of(named(run, t7="z2_offload"))) == (
        "| tuning_space   |   num_experiments |   best_metric_val | best_exp_name   |\n"
        "|:---------------|------------------:|------------------:|:----------------|\n"
        "| z0             |                 2 |           90.1269 | t5              |\n"
        "| z1             |                 2 |           187.298 | t2              |\n"
        "| z2             |                 1 |           1.5e+13 | t6              |\n"
        "| z2_offload     |                 1 |           148.154 | t7              |\n"
        "| z3             |                 1 |                 - | -               |\n"
        "| global         |                 7 |           1.5e+13 | t6              |\n"
        "\n"
        "Tuning completed in 0:01:20. Total number of experiments: 7.\n"
    )


def test_the_best_of_all_is_as_the_finals_measured_it() -> None:
    run = run_of_world(Steady(), finals=None, trials=60)
    [row] = [s for s in autotuner_files.summary_text(RunView.of(run)).splitlines() if "global" in s]
    assert run.best is not None and run.best_value != run.value(run.best)
    assert f" {run.best_value:g} | {run.best.name}" in row


def test_all_files(tmp_path: Path) -> None:
    results, exps = tmp_path / "a" / "results", tmp_path / "exps"
    earlier = exps / "z0_gas1_tmbspg1.json"
    exps.mkdir()
    earlier.write_text("earlier")
    autotuner_files.write_files(run_of((1, 8, ran(120))), results, exps, "earlier")
    run = run_of((1, 8, ran(120)), (3, 16, ran(150)))
    autotuner_files.write_files(run, results, exps, COMMAND)
    assert earlier.read_text() == "earlier"
    earlier.unlink()
    assert sorted(path.name for path in results.iterdir()) == [
        "cmd_optimal.txt",
        "ds_config_optimal.json",
        "summary.txt",
    ]
    optimal = json.loads((results / "ds_config_optimal.json").read_text())
    assert optimal == {
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 3},
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 1,
    }
    assert (results / "cmd_optimal.txt").read_text() == COMMAND + "\n"
    assert (results / "summary.txt").read_text() == autotuner_files.summary_text(RunView.of(run))
    assert sorted(path.name for path in exps.iterdir()) == ["t0.json", "t1.json", "t2.json"]
    description = json.loads((exps / "t2.json").read_text())
    assert list(description) == ["name", "ds_config", "num_gpus", "num_nodes"]
    assert description == {"name": "t2", "ds_config": optimal, "num_gpus": 2, "num_nodes": 1}
    own = json.loads((exps / "t1.json").read_text())["ds_config"]
    assert own["zero_optimization"] == {"stage": 1}
    assert "autotuning" not in own


def test_nothing_is_optimal_where_nothing_ran(tmp_path: Path) -> None:
    autotuner_files.write_files(
        run_of((1, 8, failed("OOM"))), tmp_path / "r", tmp_path / "e", COMMAND
    )
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["summary.txt"]
    assert len(list((tmp_path / "e").iterdir())) == 2


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("in the way")
    with pytest.raises(UserInputError) as caught:
        autotuner_files.write_files(run_of(), folder, tmp_path / "exps", COMMAND)
    assert str(caught.value) == (
        f"{folder}: cannot be written: File exists. Give other folders as autotuning.results_dir "
        "and autotuning.exps_dir."
    )


def test_tables_are_aligned_and_escaped() -> None:
    table = Table(("a", "b"), [("x|y", "1"), ("long one", "22")], numbers=("b",))
    assert table.markdown() == [
        "| a        |   b |",
        "|:---------|----:|",
        "| x\\|y     |   1 |",
        "| long one |  22 |",
    ]
