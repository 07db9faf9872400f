"""`dsat METHOD -- WHATEVER STARTS A TRAINING`, with launchers that dsat does not know itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsat.values.outcome import OutcomeKind
from testing.command import kinds_of, run_of
from testing.local import PROGRAMS, read_json

pytestmark = pytest.mark.slow


def test_accelerate_launch_with_a_configuration_file(tmp_path: Path) -> None:
    shutil.copytree(PROGRAMS / "accelerated", tmp_path / "work")
    options = "--max-trials 4 --finals 0 --memory-model formula -m throughput --zero-stages 1 2"
    options += " --max-micro-batch 64 --run-dir run --arg-mapping"
    options += " train_micro_batch_size_per_gpu=--per_device_train_batch_size"
    # A shell's script, and the launcher in it.
    (tmp_path / "work" / "run.sh").write_text(
        "set -e\naccelerate launch --config_file accelerate.yaml train.py "
        "--per_device_train_batch_size 4\ntouch went_on\n"
    )
    command = [sys.executable, "-m", "dsat", "binary", *options.split(), "--", "bash", "run.sh"]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    told = subprocess.run(
        command,
        cwd=tmp_path / "work",
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert told.returncode == 0, told.stderr + told.stdout
    said = " ".join(told.stdout.split())
    assert "it starts 1 rank of `python train.py --per_device_train_batch_size 4`" in said
    assert not (tmp_path / "work" / "went_on").exists()
    run = run_of(tmp_path / "work" / "run")
    assert kinds_of(run) == [OutcomeKind.OK] * 3
    sizes = [trial.batch.micro_batch for trial in run.trials.values()][1:]
    assert sizes == [4, 16, 64], "its own micro batch first, then more"
    best = read_json(tmp_path / "work" / "run" / "best_ds_config.json")
    assert best["zero_optimization"]["stage"] == 1
    assert isinstance(best["train_batch_size"], int), 'no "auto" is left'
