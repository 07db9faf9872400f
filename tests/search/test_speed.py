"""The model of step times: its physics, and its fit to trials."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsat.search.normal import Array, log_expected_gain
from dsat.search.speed import RUN_SD, Points, Prior, Scales, fit, linearize
from dsat.search.step_time import CPU_CORE, FACTORS, Hardware, Job, Terms, work
from dsat.values.zero_strategy import CPU, NVME, Strategy, plain

STRATEGIES = plain(0, 1, 2, 3)
JOB = Job(params=1e9, trainable=1e9, param_bytes=2, flops_per_sample=6e12, slots=8)
# Traits are four strategies, and a setting of the script and one of DeepSpeed with two values each.
EFFECTS = np.array([0.04] * 4 + [0.2, 0.2, 0.02, 0.02])
PRIOR = Prior(JOB.hardware, EFFECTS)


def points_of(rows: list[tuple[int, float, float]], *, values: tuple[int, int] = (0, 0)) -> Points:
    """Return configurations by stage, micro batch and accumulation steps."""
    counted = {stage: work(JOB, Strategy(stage), {}) for stage in range(4)}
    traits = np.zeros((len(rows), 8))
    traits[np.arange(len(rows)), [stage for stage, _, _ in rows]] = 1.0
    traits[:, [4 + values[0], 6 + values[1]]] = 1.0
    return Points(
        work=np.array([counted[stage] for stage, _, _ in rows]),
        micro_batch=np.array([size for _, size, _ in rows], float),
        gas=np.array([gas for _, _, gas in rows], float),
        room=np.ones(len(rows)),
        traits=traits,
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
    """Return the seconds of a step by the physical model alone."""
    counted = work(job, strategy or Strategy(stage), settings)[None, :]
    theta = np.zeros(len(FACTORS))
    arrays = (np.array([float(number)]) for number in (micro_batch, gas, room))
    return float(Terms(job.hardware, counted, *arrays).seconds(theta)[0])


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
    """The link to the host is so slow that only it counts: 2 bytes per element of a rank's
    share."""
    bandwidth = 1e6
    slow = replace(JOB, hardware=replace(Hardware(), pcie_bandwidth=bandwidth))
    share = 2 * JOB.params / (1 if stage == 1 else JOB.slots)
    expected = (share + 2 * JOB.params / JOB.slots) / bandwidth
    found = seconds_of(stage, job=slow, strategy=Strategy(stage, CPU))
    assert found == pytest.approx(expected, rel=0.1)


def test_the_edge_of_memory_costs_time() -> None:
    assert seconds_of(1, room=0.0) > 1.01 * seconds_of(1, room=0.06) == 1.01 * seconds_of(1)
    on_cores = replace(JOB, hardware=CPU_CORE)
    assert seconds_of(1, job=on_cores, room=0.0) < 1.002 * seconds_of(1, job=on_cores)


def test_tiles_are_filled_by_rows_of_matrix_products_and_not_by_samples() -> None:
    """A sample of 1,024 tokens fills tiles at any micro batch; a sample of one row does not."""
    rate = {
        rows: [
            seconds_of(1, size, job=replace(JOB, flops_per_sample=6e9 * rows)) / size
            for size in (8, 9, 16)
        ]
        for rows in (1, 1024)
    }
    assert rate[1024] == sorted(rate[1024], reverse=True)
    slow = replace(JOB, params=1.0, trainable=1.0, flops_per_sample=6e13)
    one_row = replace(slow, params=1e13, trainable=1.0, param_bytes=0)
    eight, nine, sixteen = (seconds_of(0, size, job=one_row) for size in (8, 9, 16))
    assert eight < nine == sixteen


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


def drawn(rng: np.random.Generator, count: int) -> Points:
    """Return configurations with random values."""
    parts = [
        points_of(
            [(int(rng.integers(4)), int(rng.integers(1, 65)), int(rng.choice([1, 2, 4])))],
            values=(int(rng.integers(2)), int(rng.integers(2))),
        )
        for _ in range(count)
    ]
    return Points.join(parts)


def truth_of(rng: np.random.Generator, *tables: Points, scale: float = 1.0) -> list[Array]:
    """Return log seconds in a world that the prior describes, with residuals scaled by `scale`."""
    points = Points.join(tables)
    theta = PRIOR.mean + np.minimum(np.sqrt(PRIOR.variance), 0.7) * rng.normal(size=len(FACTORS))
    covariance = PRIOR.covariance(points, points, Scales(scale))
    residuals = rng.multivariate_normal(np.zeros(len(points)), covariance)
    log_s = np.log(PRIOR.terms(points).seconds(theta)) + residuals
    return np.split(log_s, np.cumsum([len(table) for table in tables])[:-1])


@pytest.mark.parametrize("seed", range(3))
def test_another_machine_is_learned_from_noisy_trials(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, other = drawn(rng, 60), drawn(rng, 200)
    true, others = truth_of(rng, table, other)
    known = fit(PRIOR, table, true + rng.normal(0, 0.03, 60), np.full(60, 0.005))
    mean, sd = known.predict(other)
    error = mean - others
    assert np.sqrt((error**2).mean()) < 0.03, "below the noise of a single trial"
    assert np.mean(np.abs(error) < 2 * sd) > 0.7
    assert 0.015 < RUN_SD * known.scales.noise < 0.045


@pytest.mark.parametrize("sd", [0.01, 0.03, 0.1])
def test_run_to_run_variation_is_noise_and_no_residual(sd: float) -> None:
    """A few configurations are measured again and again."""
    rng = np.random.default_rng(0)
    table = drawn(rng, 6)
    [true] = truth_of(rng, table)
    again = Points.join([table] * 5)
    known = fit(PRIOR, again, np.tile(true, 5) + rng.normal(0, sd, 30), np.full(30, 0.002))
    assert sd / 2 <= RUN_SD * known.scales.noise <= 2 * sd
    assert known.scales.residual <= 2


def test_residuals_are_as_large_as_measurements_say() -> None:
    rng = np.random.default_rng(3)
    table = drawn(rng, 60)
    for scale in (1.0, 4.0):
        [true] = truth_of(rng, table, scale=scale)
        known = fit(PRIOR, table, true + rng.normal(0, 0.01, 60), np.full(60, 0.005))
        assert scale / 2 <= known.scales.residual <= 2 * scale


def test_what_a_switch_does_in_one_place_it_does_elsewhere() -> None:
    """The fourth corner of a square follows from three known corners."""
    rows = [(1, 8.0, 1.0)], [(2, 16.0, 1.0)]
    table = Points.join([points_of(rows[0]), points_of(rows[0], values=(1, 0)), points_of(rows[1])])
    log_s = np.log(PRIOR.terms(table).seconds(PRIOR.mean)) + np.array([0.0, 0.3, 0.05])
    known = fit(PRIOR, table, log_s, np.full(3, 0.001))
    asked = points_of(rows[1], values=(1, 0))
    both = Points.join([asked, table.only(np.array([2]))])
    (mean, _), (sd, of_itself) = known.predict(both, reference=1)
    assert of_itself < 1e-5
    assert mean - log_s[2] == pytest.approx(0.3, abs=0.06)
    assert sd < 0.15


def test_without_residuals_it_is_a_gaussian_process_by_the_textbook() -> None:
    """Rasmussen and Williams (2006), equations 2.25 and 2.26, with linear factors."""
    rng = np.random.default_rng(5)
    table, other = drawn(rng, 10), drawn(rng, 5)
    [log_s] = truth_of(rng, table)
    known = fit(PRIOR, table, log_s, np.full(10, 0.01))
    slopes = [linearize(PRIOR.terms(points), known.theta)[1] for points in (table, other)]

    def covariance(one: int, two: int) -> Array:
        pair = (table, other)
        linear = (slopes[one] * PRIOR.variance) @ slopes[two].T
        found: Array = PRIOR.covariance(pair[one], pair[two], known.scales) + linear
        return found

    noisy = covariance(0, 0) + np.eye(10) * ((RUN_SD * known.scales.noise) ** 2 + 0.01**2)
    apart = log_s - np.log(PRIOR.terms(table).seconds(known.theta))
    apart += slopes[0] @ (known.theta - PRIOR.mean)
    between, weights = covariance(0, 1), np.linalg.solve(noisy, apart)
    prior_mean = np.log(PRIOR.terms(other).seconds(known.theta))
    prior_mean = prior_mean - slopes[1] @ (known.theta - PRIOR.mean)
    mean, sd = known.predict(other)
    assert np.allclose(mean, prior_mean + between.T @ weights, atol=1e-9)
    variance = covariance(1, 1) - between.T @ np.linalg.solve(noisy, between)
    assert np.allclose(sd**2, np.diag(variance), atol=1e-6)


def test_what_runs_counts_as_measured_with_its_predicted_time() -> None:
    rng = np.random.default_rng(2)
    table, running, other = drawn(rng, 8), drawn(rng, 2), drawn(rng, 20)
    true, _, _ = truth_of(rng, table, running, other)
    known = fit(PRIOR, table, true, np.full(8, 0.01))
    before, after = known.predict(other), known.beside(running).predict(other)
    assert np.allclose(before[0], after[0], atol=1e-9)
    assert (after[1] <= before[1] + 1e-9).all() and (after[1] < before[1]).any()


def test_tails_of_the_expected_gain() -> None:
    z = np.array([-60.0, -35.0, -10.0, -2.0, 0.0, 3.0])
    gains = log_expected_gain(z, np.ones(6))
    expected = [math.log(0.0084907), math.log(0.3989423), math.log(3.0003822)]
    assert gains[3:] == pytest.approx(expected, abs=1e-4)
    assert (np.diff(gains) > 0).all()
    assert log_expected_gain(np.array([50.0]), np.array([2.0]))[0] == pytest.approx(math.log(50))


def test_an_auto_bucket_has_the_size_that_a_trainer_gives_it() -> None:
    """With hidden size 1,024, a bucket has its square as size; DeepSpeed's default is 5e8."""
    trained, buckets = replace(JOB, hidden_size=1024), {"reduce_bucket_size": "auto"}
    square = {"reduce_bucket_size": 1024**2}
    assert np.array_equal(work(trained, Strategy(2), buckets), work(JOB, Strategy(2), square))
    assert not np.array_equal(work(trained, Strategy(2), buckets), work(JOB, Strategy(2), {}))
