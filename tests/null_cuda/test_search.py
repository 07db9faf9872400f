"""Whole searches on a machine with GPUs, by the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsat.values.outcome import OutcomeKind
from testing.command import run_of
from testing.local import PROGRAMS
from testing.null_cuda import Device
from tests.null_cuda.conftest import MachineOf

_GIB = 2**30
_SHORT = "--start-profile-step 2 --end-profile-step 3 --max-profile-steps 2".split()


@pytest.mark.slow
def test_a_script_that_names_cuda_is_simulated_and_predicted(
    null_cuda: MachineOf, tmp_path: Path
) -> None:
    machine = null_cuda(Device(total_bytes=2 * _GIB))
    options = ["--slots", "1", "--max-trials", "5", "--zero-stages", "1", "2", *_SHORT]
    command = ["python3", "train.py", "--deepspeed_config", "ds_config.json"]
    words = [sys.executable, "-m", "dsat", "model", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [*words, *options, "--", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        cwd=PROGRAMS / "names_cuda",
    )
    assert done.returncode == 0, done.stderr
    assert "predicted by formula" not in done.stdout + done.stderr
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in done.stdout + done.stderr
    run = run_of(tmp_path / "run")
    kinds = [outcome.kind for outcome in run.outcomes.values()]
    assert kinds == [OutcomeKind.OK] * len(kinds)
    config = json.loads((tmp_path / "run" / "best_ds_config.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] > 64
    assert not machine.held()
