"""The meter agrees with a stopwatch in the training script, in two real processes."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from dsat.in_trial.step_recorder import PHASES
from testing.local import bench_of

# Compares two clocks: another process between their readings costs milliseconds.
pytestmark = [pytest.mark.slow, pytest.mark.nightly]

RANKS, MICRO_BATCH, GAS = 2, 256, 4
FIRST, LAST = 3, 22
TOLERANCE = 0.05
LOST_MS = 20  # total time that other processes take between the clocks' readings


def test_the_meter_agrees_with_a_stopwatch_around_the_loop(tmp_path: Path) -> None:
    steps = {"start_step": FIRST, "end_step": LAST}
    with bench_of("stopwatch", tmp_path, slots_per_trial=RANKS, imported=True, **steps) as bench:
        trial = bench.trial(micro_batch=MICRO_BATCH, gas=GAS, flops_per_sample=1e6)
        outcome = bench.run(trial)
        assert outcome.ok and outcome.metrics is not None, bench.log(trial)
        lines = [bench.read(trial, f"stopwatch{r}.jsonl").splitlines() for r in range(RANKS)]
    metrics, count = outcome.metrics, len(outcome.step_ms)
    assert [len(rows) for rows in lines] == [FIRST - 1 + count] * RANKS, "it ended there"
    ranks = [[json.loads(line) for line in rows[FIRST - 1 :]] for rows in lines]
    # Steps that the host slowed down are counted separately; keep the other steps.
    accidents = sorted(outcome.step_ms)[count - metrics.accidents :]
    kept = [i for i, ms in enumerate(outcome.step_ms) if ms not in accidents]
    for name in ("latency", *PHASES):
        slowest = [1e3 * max(rank[i][name] for rank in ranks) for i in kept]
        expected = pytest.approx(mean(slowest), rel=TOLERANCE, abs=LOST_MS / len(kept))
        assert getattr(metrics, name) == expected, name
    # The forward pass of rank 1 takes 20 ms longer, for which rank 0 waits in the backward pass;
    # data take 12 ms, outside of all phases.
    assert metrics.forward >= 20 * GAS
    assert metrics.latency >= (20 + 12) * GAS
    samples_per_s = MICRO_BATCH * GAS * RANKS / (metrics.latency / 1e3)
    assert metrics.throughput == pytest.approx(samples_per_s, rel=1e-6)
    assert metrics.FLOPS_per_gpu == pytest.approx(metrics.throughput * 1e6 / RANKS, rel=1e-6)
