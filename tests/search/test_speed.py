"""Seconds of steps: what physics says of them, and what trials teach."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsat.search.normal import Array, log_cdf, log_expected_gain
from dsat.search.speed import Fit, Layout, Points, log_seconds
from dsat.search.step_time import CPU_CORE, TERMS, Hardware, Job, seconds, work
from dsat.values.zero_strategy import CPU, NVME, Strategy, plain

STRATEGIES = plain(0, 1, 2, 3)
JOB = Job(params=1e9, trainable=1e9, param_bytes=2, flops_per_sample=6e12, slots=8)
LAYOUT = Layout(JOB, STRATEGIES, num_values=4)


def points_of(
    rows: list[tuple[int, float, float]], *, job: Job = JOB, settings: dict[str, Any] | None = None
) -> Points:
    """Configurations by stage, micro batch and accumulation steps; no value of a knob."""
    return Points(
        strategy=np.array([stage for stage, _, _ in rows]),
        work=np.array([work(job, Strategy(stage), settings or {}) for stage, _, _ in rows]),
        knobs=np.zeros((len(rows), 4)),
        micro_batch=np.array([size for _, size, _ in rows], float),
        gas=np.array([gas for _, _, gas in rows], float),
        room=np.ones(len(rows)),
    )


def seconds_of(
    stage: int,
    micro_batch: float = 8,
    gas: float = 1,
    *,
    job: Job = JOB,
    room: float = 1.0,
    strategy: Strategy | None = None,
    **settings: Any,
) -> float:
    """Seconds of a step by the physical model alone."""
    counted = work(job, strategy or Strategy(stage), settings)[None, :]
    theta = np.array([mean for mean, _ in TERMS.values()])
    arrays = (np.array([float(number)]) for number in (micro_batch, gas, room))
    return float(seconds(job.hardware, theta, counted, *arrays)[0].s[0])


def drawn(rng: np.random.Generator, count: int) -> Points:
    rows = zip(
        rng.integers(0, 4, count), rng.integers(1, 65, count), rng.choice([1, 2, 4], count),
        strict=True,
    )  # fmt: skip
    points = points_of([(int(s), float(m), float(g)) for s, m, g in rows])
    return replace(points, knobs=np.eye(5)[rng.integers(0, 5, count)][:, :4])


def truth_of(rng: np.random.Generator) -> Array:
    """Parameters as the prior has them, of hardware that is a little other than expected."""
    mean, sd = LAYOUT.prior()
    return mean + np.minimum(sd, 0.7) * rng.normal(size=len(mean))


# -- the physical model


def test_communication_hides_behind_the_backward_pass() -> None:
    slow = replace(JOB, hardware=replace(Hardware(), link_bandwidth=5e9))
    apart, beside = (
        seconds_of(2, 8, job=slow, overlap_comm=on, reduce_bucket_size=10**7) for on in (0, True)
    )
    assert beside < apart
    fast = replace(
        JOB, hardware=replace(Hardware(), link_bandwidth=1e15, protocols=((1.0, 0.0, 0.0),))
    )
    assert seconds_of(2, 8, job=fast, overlap_comm=True) == pytest.approx(
        seconds_of(2, 8, job=fast), rel=0.02
    )


def test_accumulation_spares_the_optimizer_and_what_is_reduced_once() -> None:
    assert seconds_of(3, stage3_prefetch_bucket_size="auto") == seconds_of(3)
    for stage in range(4):
        assert seconds_of(stage, gas=4) < 4 * seconds_of(stage)
    slow = replace(JOB, hardware=replace(Hardware(), link_bandwidth=2e9))
    grows = [seconds_of(stage, gas=8, job=slow) / seconds_of(stage, job=slow) for stage in (1, 2)]
    assert grows[1] > 1.5 * grows[0], "stage 2 reduces in every micro step"


def test_between_hosts_every_stage_pays_and_hpz_spares_a_gather() -> None:
    large = replace(JOB, params=7e9, trainable=7e9)
    apart = replace(large, slots_per_host=4)
    for stage in (1, 3):
        assert seconds_of(stage, 1, job=apart) > 1.1 * seconds_of(stage, 1, job=large)
    assert seconds_of(3, 1, job=apart, zero_hpz_partition_size=4) < seconds_of(3, 1, job=apart)
    on_one_host = seconds_of(3, 1, job=large)
    assert seconds_of(3, 1, job=large, zero_hpz_partition_size=4) == on_one_host


@pytest.mark.parametrize("slots", [1, 8])
def test_moving_more_costs_more(slots: int) -> None:
    job = replace(JOB, slots=slots)
    more = (Strategy(3), Strategy(3, CPU), Strategy(3, CPU, CPU), Strategy(3, NVME, NVME))
    ladder = [seconds_of(3, job=job, strategy=strategy) for strategy in more]
    assert ladder == sorted(ladder)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_offloaded_optimizer_gets_gradients_and_sends_parameters_back(stage: int) -> None:
    """Beside a slow link to the host nothing else counts: 2 bytes of each, of a rank's share."""
    bandwidth = 1e6
    slow = replace(JOB, hardware=replace(Hardware(), pcie_bandwidth=bandwidth))
    share = 2 * JOB.params / (1 if stage == 1 else JOB.slots)
    expected = (share + 2 * JOB.params / JOB.slots) / bandwidth
    found = seconds_of(stage, job=slow, strategy=Strategy(stage, CPU))
    assert found == pytest.approx(expected, rel=0.1)


def test_the_edge_of_memory_and_samples_beside_tiles_cost_time() -> None:
    assert seconds_of(1, room=0.0) > 1.01 * seconds_of(1, room=0.06) == 1.01 * seconds_of(1)
    assert seconds_of(1, 63) / 63 > seconds_of(1, 64) / 64
    on_cores = replace(JOB, hardware=CPU_CORE)
    assert seconds_of(1, job=on_cores, room=0.0) < 1.002 * seconds_of(1, job=on_cores)


def test_recomputation_costs_a_third_more_computation() -> None:
    ratio = seconds_of(1, 64, gradient_checkpointing=True) / seconds_of(1, 64)
    assert 1.25 < ratio < 1.34


def test_it_needs_neither_torch_nor_scipy() -> None:
    program = (
        "import sys, dsat.search.speed; print([m for m in ('torch', 'scipy') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout.strip() == "[]", said.stderr


# -- what trials teach


@pytest.mark.parametrize("seed", range(3))
def test_another_machine_is_learned_from_noisy_trials(seed: int) -> None:
    rng = np.random.default_rng(seed)
    theta, table, other = truth_of(rng), drawn(rng, 60), drawn(rng, 200)
    log_s = log_seconds(LAYOUT, table, theta)[0] + rng.normal(0, 0.03, 60)
    fit = Fit.prior(LAYOUT).updated(table, log_s, np.full(60, 0.005))
    mean, sd = fit.predict(other)
    error = mean - log_seconds(LAYOUT, other, theta)[0]
    assert np.sqrt((error**2).mean()) < 0.03, "below the noise of a single trial"
    assert np.mean(np.abs(error) < 2 * sd) > 0.85
    assert 0.015 < fit.run_sd < 0.045


def test_a_wild_measurement_does_little() -> None:
    rng = np.random.default_rng(1)
    theta, table, other = truth_of(rng), drawn(rng, 60), drawn(rng, 100)
    log_s = log_seconds(LAYOUT, table, theta)[0] + rng.normal(0, 0.02, 60)
    wild = log_s + np.where(np.arange(60) == 30, 1.0, 0.0)
    found = [Fit.prior(LAYOUT).updated(table, y, np.full(60, 0.005)) for y in (log_s, wild)]
    moved = np.abs(found[0].predict(other)[0] - found[1].predict(other)[0])
    assert float(np.median(moved)) < 0.03


def test_the_gradient_is_that_of_the_prediction() -> None:
    rng = np.random.default_rng(1)
    theta, points = truth_of(rng), drawn(rng, 12)
    _, gradient = log_seconds(LAYOUT, points, theta)
    for column in range(len(theta)):
        step = 1e-5 * np.eye(len(theta))[column]
        up, down = (log_seconds(LAYOUT, points, theta + sign * step)[0] for sign in (1, -1))
        assert np.allclose(gradient[:, column], (up - down) / 2e-5, atol=1e-6)


def test_tails_of_the_normal_distribution() -> None:
    z = np.array([-60.0, -35.0, -10.0, -2.0, 0.0, 3.0])
    logs, gains = log_cdf(z), log_expected_gain(z, np.ones(6))
    expected = [math.log(0.0227501), math.log(0.5), math.log(0.9986501)]
    assert logs[3:] == pytest.approx(expected, abs=1e-4)
    assert logs[2] == pytest.approx(-53.2313, abs=1e-3)
    assert gains[4:] == pytest.approx([math.log(0.3989423), math.log(3.0003822)], abs=1e-4)
    assert (np.diff(logs) > 0).all() and (np.diff(gains) > 0).all()
    assert log_expected_gain(np.array([50.0]), np.array([2.0]))[0] == pytest.approx(math.log(50))
