"""The training command that a run prints, run by hand, against trials of the same configuration."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import dsat
from benchmarks import common
from benchmarks.gpu.step import HERE
from dsat.engines.engine import LocalEngine
from dsat.in_trial.steps import summarize
from dsat.tuning.local import local_engine
from dsat.tuning.preparation import prepare_run
from dsat.tuning.settings import Settings
from dsat.values.outcome import Metrics
from dsat.values.trial import Trial, TrialKind

_MICRO_BATCH, _STAGE = 8, 1
_CONFIG = {
    "train_micro_batch_size_per_gpu": _MICRO_BATCH,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": _STAGE},
}
_WARM_UP_STEPS = 20


@dataclass(frozen=True)
class Compared:
    """Milliseconds of a step in a trial, and samples/s in that trial and by hand."""

    step_ms: float
    trial: float
    hand: float


def compare(folder: Path, steps: int) -> Compared:
    """Measure a small transformer for `steps` steps, in a trial and by hand.

    By hand, the script times its steps with its own clock. In both measurements, the same rule
    excludes steps that the host disturbed.

    Args:
        folder: an empty folder.
    """
    clock = folder / "clock.json"
    config = folder / "ds_config.json"
    config.write_text(json.dumps(_CONFIG))
    command = [sys.executable, str(HERE / "own_clock.py"), "--steps", str(steps)]
    command += ["--deepspeed_config", str(config)]
    os.environ["OWN_CLOCK"] = str(clock)
    line = _printed_command(command, folder / "run")
    settings = Settings(method="random", dry_run=True, command=tuple(command), slots=1)
    with prepare_run(settings) as ready:
        pass  # leaving releases nothing that trials need
    batch = ready.plan.own_batch
    run_dir = folder / "trials"
    run_dir.mkdir()
    with contextlib.closing(local_engine(ready, run_dir)) as engine:
        for number in range(2):  # the first round compiles kernels
            common.run_well(["bash", "-c", line], folder, common.environment())
            seconds = json.loads(clock.read_text())[_WARM_UP_STEPS:]  # not the trial's
            trial = Trial(number, TrialKind.SEARCH, f"t{number}", _STAGE, batch, batch.config())
            metrics = _measure(engine, trial)
    hand = batch.train_batch_size / summarize(seconds).mean
    return Compared(metrics.latency, metrics.throughput, hand)


def _measure(engine: LocalEngine, trial: Trial) -> Metrics:
    outcome = common.run_trial(engine, trial)
    if outcome.metrics is None:
        raise SystemExit(f"the trial failed: {outcome.message}\n{outcome.detail}")
    return outcome.metrics


def _printed_command(command: list[str], run_dir: Path) -> str:
    """Return the training command that dsat prints after it has measured only the baseline."""
    result = dsat.tune(
        command,
        method="random",
        metric="throughput",
        devices=1,
        zero_stages=[_STAGE],
        keep=["all"],
        min_micro_batch=_MICRO_BATCH,
        max_micro_batch=_MICRO_BATCH,
        memory_model="none",
        max_trials=2,
        finals=0,
        run_dir=run_dir,
    )
    assert result.train_command is not None and len(result.trials) == 1, result.verdict
    return result.train_command
