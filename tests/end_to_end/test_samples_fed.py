"""Scripts with few data, or with an accumulation of their own: what is reported is what was fed."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

from dsat.run.run import Run
from dsat.values.outcome import OutcomeKind
from testing.command import run_of, typed
from testing.local import read_json

pytestmark = pytest.mark.slow

SAMPLES = 96
# The default DataLoader: the last batch of an epoch is short. Each optimizer step's samples and
# seconds are written by the script itself. A batch takes as long however large it is, or noise
# would decide whether larger ones are tried.
SCRIPT = """
import json, os, pathlib, time
import deepspeed, torch
from torch.utils.data import DataLoader

config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000000,
                          "allgather_bucket_size": 1000000},
}
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 1))
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
data = torch.randn(%(samples)d, 256)
loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu())
steps, fed, last, calls = [], 0, time.perf_counter(), 0
try:
    for epoch in range(2000):
        for batch in loader:
            time.sleep(0.05)
            engine.backward(engine(batch).square().mean())
            fed, calls = fed + len(batch), calls + 1
            if calls %% %(every)d == 0:
                engine.step()
                now = time.perf_counter()
                steps.append((fed, now - last))
                fed, last = 0, now
finally:
    folder = os.environ.get("DSAT_TRIAL_DIR", ".")
    pathlib.Path(folder, "steps.json").write_text(json.dumps(steps))
"""


def tuned(folder: Path, *options: str, every: int) -> tuple[Run, str]:
    (folder / "train.py").write_text(SCRIPT % {"samples": SAMPLES, "every": every})
    words = "random --finals 0 -m throughput --memory-model formula --slot-memory 150MiB "
    words += "--max-profile-steps 8 --fix all -z 1 --run-dir run"
    told = typed(folder, *words.split(), *options, "--", "python3", "train.py")
    assert told.status == 0, told
    return run_of(folder / "run"), told.out


def samples_per_s(folder: Path, run: Run) -> tuple[float, float]:
    """Of the fastest: what is reported, and what the script's own clock has of its full steps."""
    assert run.leader is not None
    metrics = run.outcomes[run.leader.id].metrics
    assert metrics is not None
    steps = read_json(folder / "run" / "trials" / run.leader.name / "steps.json")
    most = max(fed for fed, _ in steps)
    return metrics.throughput, median(fed / taken_s for fed, taken_s in steps if fed == most)


@pytest.mark.nightly
def test_no_micro_batch_is_larger_than_the_data(tmp_path: Path) -> None:
    run, _ = tuned(tmp_path, "-mt", "5", every=1)
    sizes = [trial.batch.micro_batch for trial in run.trials.values()]
    assert SAMPLES / 4 <= max(sizes) <= SAMPLES, "its data loader tells how many there are"
    assert {outcome.kind for outcome in run.outcomes.values()} == {OutcomeKind.OK}
    reported, own = samples_per_s(tmp_path, run)
    assert reported == pytest.approx(own, rel=0.5), "short batches are not in it"


@pytest.mark.nightly
def test_steps_of_four_micro_batches_are_measured_as_such(tmp_path: Path) -> None:
    run, told = tuned(tmp_path, "-mt", "3", "--max-micro-batch", "48", every=4)
    reported, own = samples_per_s(tmp_path, run)
    assert reported == pytest.approx(own, rel=0.5), "not four times too low"
    assert re.search(r"takes 4 times as many micro batches", told)
