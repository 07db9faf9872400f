"""The meter against a stopwatch in the training script itself, in real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import mean

import pytest

from dsat.in_trial.step_recorder import PHASES
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial
from testing.local import Bench, bench_of

# Two clocks are compared: another process between them costs milliseconds.
pytestmark = pytest.mark.nightly

MICRO_BATCH = 256
FIRST, LAST = 3, 22
TOLERANCE = 0.05
LOST_MS = 20  # to other processes between the two clocks, in all steps together


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("stopwatch")
    steps = {"start_step": FIRST, "end_step": LAST}
    with bench_of(
        "stopwatch", folder, slots_per_trial=request.param, imported=True, **steps
    ) as bench:
        yield bench


@pytest.mark.parametrize("gas", [1, 4])
def test_the_meter_agrees_with_a_stopwatch_around_the_loop(bench: Bench, gas: int) -> None:
    trial = bench.trial(micro_batch=MICRO_BATCH, gas=gas, flops_per_sample=1e6)
    outcome = bench.run(trial)
    assert outcome.ok and outcome.metrics is not None, bench.log(trial)
    metrics = outcome.metrics
    stopwatch = _slowest(bench, trial, len(outcome.step_ms))
    assert min(stopwatch["latency"]) > 20 * gas, "too short to be compared"
    # Accidents of the host are counted apart: these are the steps that the meter kept.
    kept = [i for i, ms in enumerate(outcome.step_ms) if ms not in _accidents(outcome)]
    for name, rows in stopwatch.items():
        values = [rows[i] for i in kept]
        measured = getattr(metrics, name)
        expected = pytest.approx(mean(values), rel=TOLERANCE, abs=LOST_MS / len(kept))
        assert measured == expected, name

    # What is derived from it.
    ranks = bench.slots_per_trial
    samples_per_s = MICRO_BATCH * gas * ranks / (metrics.latency / 1e3)
    assert metrics.throughput == pytest.approx(samples_per_s, rel=1e-6)
    assert metrics.FLOPS_per_gpu == pytest.approx(metrics.throughput * 1e6 / ranks, rel=1e-6)
    if ranks == 1:
        # Loading data takes 12 ms per micro step, outside of all phases but not of the step.
        phases = metrics.forward + metrics.backward + metrics.step
        assert metrics.latency - phases >= 12 * gas
    else:
        # The forward pass of rank 1, which takes 20 ms longer; rank 0 waits in the backward pass.
        assert metrics.forward >= 20 * gas
        assert metrics.latency >= (20 + 12) * gas


def _accidents(outcome: Outcome) -> list[float]:
    assert outcome.metrics is not None
    return sorted(outcome.step_ms)[len(outcome.step_ms) - outcome.metrics.accidents :]


def _slowest(bench: Bench, trial: Trial, num_steps: int) -> dict[str, list[float]]:
    """The stopwatches' milliseconds in the measured steps, of the slowest rank in each."""
    ranks = [
        [json.loads(line) for line in bench.read(trial, f"stopwatch{rank}.jsonl").splitlines()]
        for rank in range(bench.slots_per_trial)
    ]
    assert [len(rows) for rows in ranks] == [FIRST - 1 + num_steps] * len(ranks), "it ended there"
    steps = [rows[FIRST - 1 :] for rows in ranks]
    return {
        name: [1e3 * max(rank[name] for rank in step) for step in zip(*steps, strict=True)]
        for name in ("latency", *PHASES)
    }
