"""Mistakes that show only with an installed DeepSpeed, an earlier run or a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing.scenarios import User

MICRO, ZERO = "train_micro_batch_size_per_gpu", "zero_optimization"
HPARAMS = {"deepspeed_config": "ds.json"}


@pytest.mark.slow  # imports DeepSpeed
@pytest.mark.parametrize(
    ("config", "overrides", "words"),  # all problems: tests/in_trial/test_config_check.py
    [
        ({ZERO: {"stage": 1, "reduce_bucket": 10**6}}, {}, f"ds.json {ZERO}.reduce_bucket size"),
        pytest.param(
            {ZERO: {"stage": 2, "overlap_comm": [True, "often"]}},
            {},
            f"ds.json {ZERO}.overlap_comm boolean 'often'",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {},
            {"gradient_cliping": 1},
            "overwrite_deepspeed_args.gradient_cliping gradient_clipping",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_settings_that_deepspeed_refuses(
    user: User, config: dict[str, Any], overrides: dict[str, Any], words: str
) -> None:
    hparams = {**HPARAMS, "overwrite_deepspeed_args": overrides}
    user.has({MICRO: 1, **config}, hyperparameters=hparams)
    told = user.types("asha", "deepspeed.yaml", ".")
    assert told.status == 2
    assert [word for word in words.split() if word not in told.err.splitlines()[-1]] == []


@pytest.mark.parametrize("key", ["metric", "max_length"])
def test_a_trial_class_cannot_be_trained_to_no_end(user: User, key: str) -> None:
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 9}}
    del searcher[key]
    trial = "python3 -m determined.launch.deepspeed --trial model_def:Mine"
    user.has(entrypoint=trial, searcher=searcher)
    told = user.types("asha", "deepspeed.yaml", ".", "--run-full-experiment")
    assert told.status == 2 and "deepspeed.yaml: searcher" in told.err and key in told.err
    assert user.types("asha", "deepspeed.yaml", ".", "--dry-run").status == 0


def test_a_script_may_have_the_name_of_a_library(tmp_path: Path) -> None:
    for name in ("rich.py", "wrapt.py"):
        (tmp_path / name).write_text("raise SystemExit('the script was run')\n")
    (tmp_path / "deepspeed.yaml").write_text(json.dumps([]))
    process = subprocess.run(
        [sys.executable, "-m", "dsat", "asha", "deepspeed.yaml", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert process.stderr.startswith("dsat: error: deepspeed.yaml: ")
    assert len(process.stderr.splitlines()) == 1, "the script was run"
