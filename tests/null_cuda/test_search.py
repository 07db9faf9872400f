"""Whole searches by the command on a machine with GPUs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from dsat.engines.ports import free_ports
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import TrialKind
from testing import warm_command
from testing.command import run_of, run_to_end
from testing.local import PROGRAMS
from testing.null_cuda import Device
from tests.null_cuda.conftest import MachineOf
from tests.null_cuda.test_engine import _CONFIG

_GIB = 2**30
_SHORT = "--start-profile-step 2 --end-profile-step 3 --max-profile-steps 2".split()
_SHORT += ["--fix", "torch_compile"]  # kernels cannot be compiled for the null CUDA


@pytest.mark.nightly
@pytest.mark.slow
def test_a_script_that_names_cuda_is_simulated_and_predicted(
    null_cuda: MachineOf, imported: tuple[str, ...], tmp_path: Path
) -> None:
    machine = null_cuda(Device(total_bytes=2 * _GIB))
    (tmp_path / "ds.json").write_text(json.dumps(_CONFIG))
    words = [*warm_command.words(imported), "model", "--run-dir", str(tmp_path / "run"), *_SHORT]
    words += "--slots 1 --max-trials 5 --zero-stages 1 2 --finals 0 --".split()
    words += ["python3", "only_cuda.py", "--deepspeed_config", str(tmp_path / "ds.json")]
    told = run_to_end(words, PROGRAMS / "memory")
    assert told.status == 0, told
    assert "predicted by formula" not in told.out + told.err
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in told.out + told.err
    run = run_of(tmp_path / "run")
    kinds = [outcome.kind for outcome in run.outcomes.values()]
    assert kinds == [OutcomeKind.OK] * len(kinds)
    config = json.loads((tmp_path / "run" / "best_ds_config.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] > 64
    assert not machine.held()


# Each rank writes what it runs with, and trains as `only_cuda.py`.
BOUND = """
import json, os, runpy, sys
names = "OMP_NUM_THREADS", "NCCL_BUFFSIZE"
seen = {"cores": sorted(os.sched_getaffinity(0)), **{name: os.environ.get(name) for name in names}}
with open(f"{os.environ['DSAT_TRIAL_DIR']}/seen-{os.environ['RANK']}.json", "w") as file:
    json.dump(seen, file)
sys.path.insert(0, STYLES)
runpy.run_path(f"{STYLES}/only_cuda.py", run_name="__main__")
"""


@pytest.mark.nightly
def test_cores_and_variables_reach_ranks_as_the_launcher_gives_them(
    null_cuda: MachineOf, tmp_path: Path
) -> None:
    """As with `deepspeed --bind_cores_to_rank`, a rank has its own cores, with one thread for
    each."""
    null_cuda(Device(), Device())
    (tmp_path / "train.py").write_text(f"STYLES = {str(PROGRAMS / 'memory')!r}\n{BOUND}")
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {**_CONFIG, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    (tmp_path / "ds.json").write_text(json.dumps({**config, "zero_allow_untested_optimizer": True}))
    command = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_ports(1)[0])]
    command += ["train.py", "--deepspeed_config", "ds.json"]
    others = "overlap_comm reduce_scatter reduce_bucket_size "
    others += "contiguous_gradients round_robin_gradients offload_optimizer"
    options = ["--train-batch-size", "own", "--zero-stages", "2", "--slots", "2", "--finals", "0"]
    options += ["--memory-model", "formula", *_SHORT, *others.split(), "--max-trials", "9"]
    options += ["--tune", "bind_cores_to_rank", "--tune", "ENV:NCCL_BUFFSIZE"]
    start = [sys.executable, "-m", "dsat", "model", "--run-dir", str(tmp_path / "run"), *options]
    told = run_to_end([*start, "--", *command], tmp_path)
    assert told.status == 0, told

    ran: set[object] = set()
    one, other = sorted(os.sched_getaffinity(0))[:2]
    for trial in run_of(tmp_path / "run").trials.values():
        if trial.kind is TrialKind.SEARCH:
            binds = trial.script_args.get("bind_cores_to_rank", False)
            size = trial.script_args.get("ENV:NCCL_BUFFSIZE")
            ran |= {binds, size}
            for rank in range(2):
                path = tmp_path / "run" / "trials" / trial.name / f"seen-{rank}.json"
                seen = json.loads(path.read_text())
                assert (seen["NCCL_BUFFSIZE"], seen["OMP_NUM_THREADS"]) == (size, "1")
                assert (seen["cores"] == [(one, other)[rank]]) is binds, trial.script_args
    assert ran > {True, str(2**23)}
