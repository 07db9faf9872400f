from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from dsat.search import step_time
from dsat.search.normal import (
    Array,
    expected_largest_gain,
    expected_largest_gain_of,
    inverse_mills_ratio,
    log_cdf,
    log_expected_gain,
)
from dsat.values.zero_strategy import CPU, NVME, Strategy, plain

KNOBS = 6
DILUTED = np.arange(KNOBS) < 4  # beyond a micro batch of 32, the reference
STRATEGIES = plain(0, 1, 2, 3)


def layout_of(
    strategies: Sequence[Strategy] = STRATEGIES, *, slots: int = 8, reference: float = 32.0
) -> step_time.Layout:
    """Three knobs with two values besides the default each."""
    groups = np.arange(KNOBS) // 2
    prior = step_time.KnobPrior(np.zeros(KNOBS), np.full(KNOBS, 0.02), groups, DILUTED)
    return step_time.Layout(strategies, slots, reference, prior)


class Truth:
    """A machine by the formula, in seconds; what a strategy adds and what knobs do is drawn."""

    def __init__(self, seed: int, noise: float) -> None:
        self.rng = np.random.default_rng([seed, 99])
        self.noise = noise
        self.sample = 0.01 * float(np.exp(self.rng.normal(0, 1)))
        self.fixed = 32 * self.sample * float(np.exp(self.rng.normal(math.log(0.1), 1)))
        self.floor = 32 * self.sample * float(np.exp(self.rng.normal(math.log(0.1), 1)))
        every, once = np.exp(self.rng.normal(math.log(0.02), 1, size=2)) * 32 * self.sample
        own = np.exp(self.rng.normal(0, 0.5, size=(2, 4)))
        self.every = every * own[0] * np.array((0.1, 0.1, 1.0, 3.0))
        self.once = once * own[1] * np.array((2.0, 2.0, 1.0, 0.1))
        self.knobs = self.rng.normal(0, 0.02, size=KNOBS)

    def log_s(self, points: step_time.Points) -> Array:
        at = points.strategy.astype(int)
        work = np.maximum(self.floor, self.fixed + self.sample * points.micro_batch)
        total = points.gas * (work + self.every[at]) + self.once[at]
        left = np.minimum(1.0, 32 / points.micro_batch)[:, None]
        result: Array = np.log(total) + (points.knobs * np.where(DILUTED, left, 1)) @ self.knobs
        return result

    def measure(self, points: step_time.Points) -> Array:
        return self.log_s(points) + self.rng.normal(0, self.noise, size=len(points))


def points_of(rng: np.random.Generator, count: int, *, largest: int = 64) -> step_time.Points:
    knobs = np.zeros((count, KNOBS))
    for knob in range(KNOBS // 2):
        value = rng.integers(0, 3, size=count)
        for which in (1, 2):
            knobs[value == which, 2 * knob + which - 1] = 1.0
    return step_time.Points(
        strategy=rng.integers(0, 4, size=count),
        micro_batch=rng.integers(1, largest + 1, size=count).astype(float),
        gas=rng.choice([1.0, 2.0, 4.0], size=count),
        knobs=knobs,
    )


def some(points: step_time.Points, chosen: Array) -> step_time.Points:
    return step_time.Points(
        points.strategy[chosen],
        points.micro_batch[chosen],
        points.gas[chosen],
        points.knobs[chosen],
    )


def single(strategy: int, micro_batch: float, gas: float = 1.0) -> step_time.Points:
    return step_time.Points(
        np.array([strategy]), np.array([micro_batch]), np.array([gas]), np.zeros((1, KNOBS))
    )


def predicted_s(fit: step_time.Fit, strategy: int, micro_batch: float, gas: float = 1.0) -> float:
    return math.exp(float(fit.predict(single(strategy, micro_batch, gas))[0][0]))


@pytest.mark.parametrize("seed", range(5))
def test_a_table_with_noise_is_recovered(seed: int) -> None:
    truth = Truth(seed, 0.05)
    table, other = points_of(truth.rng, 150), points_of(truth.rng, 300)
    fit = step_time.fit(layout_of(), table, truth.measure(table), np.full(150, 0.01))
    mean, _ = fit.predict(other)
    error = mean - truth.log_s(other)
    assert np.sqrt((error**2).mean()) < 0.03, "below the noise of a single measurement"
    assert np.median(np.abs(error)) < 0.02
    assert 0.035 < fit.run_sd < 0.065
    more_s = predicted_s(fit, 0, 64) - predicted_s(fit, 0, 32)
    assert more_s == pytest.approx(32 * truth.sample, rel=0.05)


def test_the_terms_of_the_formula_are_recovered() -> None:
    truth = Truth(0, 0.005)
    truth.fixed, truth.floor, truth.sample = 0.02, 0.1, 0.01
    truth.every, truth.once = (
        np.array([0.001, 0.002, 0.03, 0.09]),
        np.array([0.05, 0.03, 0.02, 0.0]),
    )
    table = points_of(truth.rng, 300)
    fit = step_time.fit(layout_of(), table, truth.measure(table), np.zeros(300))
    for stage in (0, 2, 3):
        for micro_batch in (1, 64):
            one, two = (predicted_s(fit, stage, micro_batch, gas) for gas in (1, 2))
            micro_step_s = max(0.1, 0.02 + 0.01 * micro_batch) + truth.every[stage]
            assert two - one == pytest.approx(micro_step_s, rel=0.02)
            assert 2 * one - two == pytest.approx(truth.once[stage], abs=0.003)
    for number, effect in enumerate(truth.knobs):
        row = np.eye(KNOBS)[number : number + 1]
        mean, sd = fit.knob_effects(row)
        assert abs(float(mean[0]) - effect) < max(4 * float(sd[0]), 0.004)


@pytest.mark.parametrize("shape", ["falling", "flat", "rising faster", "noise"])
def test_no_term_is_ever_negative(shape: str) -> None:
    """Not even where a line through the times has a negative intercept or slope."""
    sizes = np.array([1.0, 2, 4, 8, 16, 32, 64])
    times = {
        "falling": 1 / sizes,
        "flat": np.full(7, 0.5),
        "rising faster": sizes**1.5,
        "noise": np.exp(np.random.default_rng(0).normal(0, 1, 7)),
    }[shape]
    table = step_time.Points(np.arange(7) % 4, sizes, np.ones(7), np.zeros((7, KNOBS)))
    fit = step_time.fit(layout_of(), table, np.log(times), np.zeros(7))
    for strategy in range(4):
        of_sizes = [predicted_s(fit, strategy, size) for size in sizes]
        # Beside the terms there is the smooth rest, of a few percent.
        assert all(after > 0.95 * before for before, after in itertools.pairwise(of_sizes))
        assert of_sizes[-1] > 0.9 * of_sizes[0]
        for size in sizes:
            one, two, four = (predicted_s(fit, strategy, size, gas) for gas in (1, 2, 4))
            assert one < two < four, "a micro step takes time"
            assert two < 2 * one and four < 2 * two, "and so does the end of a step"
    mean, sd = fit.predict(table)
    assert np.isfinite(mean).all() and np.isfinite(sd).all()


def test_two_micro_batches_tell_the_sample_from_the_rest() -> None:
    truth = Truth(3, 0.0)
    truth.floor, truth.every, truth.once = 1e-6, np.zeros(4), np.zeros(4)
    truth.fixed, truth.sample = 0.1, 0.01
    table = step_time.Points(
        np.zeros(2, int), np.array([8.0, 32.0]), np.ones(2), np.zeros((2, KNOBS))
    )
    before = step_time.fit(layout_of(), single(0, 32), truth.log_s(single(0, 32)), np.zeros(1))
    after = step_time.fit(layout_of(), table, truth.log_s(table), np.zeros(2))
    at = single(0, 16)
    assert abs(float(after.predict(at)[0][0]) - math.log(0.26)) < 0.03
    assert float(after.predict(at)[1][0]) < 0.5 * float(before.predict(at)[1][0])


def test_one_measurement_in_a_strategy_tells_of_the_others() -> None:
    """Stage 3 is known to be slower than stage 1 before it was tried, by how much is not."""
    fit = step_time.fit(layout_of(), single(1, 32), np.zeros(1), np.zeros(1))
    mean, sd = (
        np.array(values)
        for values in zip(*(fit.predict(single(s, 32)) for s in (1, 3)), strict=True)
    )
    assert mean[1, 0] > mean[0, 0] + 0.01
    assert sd[1, 0] > 2 * sd[0, 0]


def test_what_was_never_tried_is_uncertain() -> None:
    table = step_time.Points(
        np.zeros(4, int), np.array([4.0, 8, 16, 32]), np.ones(4), np.zeros((4, KNOBS))
    )
    fit = step_time.fit(layout_of(), table, np.log([0.5, 0.9, 1.7, 3.3]), np.zeros(4))
    _, near = fit.predict(single(0, 16))
    with_knob = step_time.Points(np.zeros(1, int), np.array([16.0]), np.ones(1), np.eye(KNOBS)[:1])
    _, knob = fit.predict(with_knob)
    assert float(near[0]) < 0.018 < 0.024 < float(knob[0])


@pytest.mark.parametrize("count", [6, 12, 40])
def test_the_uncertainty_is_calibrated(count: int) -> None:
    """Over many machines the truth lies within two standard deviations about as often as said."""
    inside, total, off = 0, 0, []
    for seed in range(40):
        truth = Truth(seed, 0.03)
        table, other = points_of(truth.rng, count), points_of(truth.rng, 50)
        fit = step_time.fit(layout_of(), table, truth.measure(table), np.full(count, 0.01))
        mean, sd = fit.predict(other)
        z = (mean - truth.log_s(other)) / sd
        inside += int((np.abs(z) < 2).sum())
        total += 50
        off.append(float(z.mean()))
    assert 0.88 < inside / total < 0.98
    assert abs(np.mean(off)) < 0.5


def test_a_single_wild_measurement_does_little() -> None:
    truth = Truth(1, 0.02)
    table = points_of(truth.rng, 60)
    log_s = truth.measure(table)
    wild = log_s.copy()
    wild[30] += 1.0
    other = points_of(truth.rng, 100)
    plain_fit = step_time.fit(layout_of(), table, log_s, np.full(60, 0.01))
    wild_fit = step_time.fit(layout_of(), table, wild, np.full(60, 0.01))
    moved = np.abs(plain_fit.predict(other)[0] - wild_fit.predict(other)[0])
    assert float(np.median(moved)) < 0.02


def test_knobs_that_do_nothing_make_the_others_less_promising() -> None:
    rng = np.random.default_rng(5)
    table = points_of(rng, 60)
    tried = table.knobs.copy()
    tried[:, 4:] = 0.0  # the third knob was left alone
    table = step_time.Points(table.strategy, table.micro_batch, table.gas, tried)
    untried = np.eye(KNOBS)[4:5]
    said = {}
    for size in (0.0, 0.1):
        truth = Truth(5, 0.003)
        truth.knobs = np.where(np.arange(KNOBS) % 2, size, -size)
        fit = step_time.fit(layout_of(), table, truth.measure(table), np.zeros(60))
        said[size] = float(fit.knob_effects(untried)[1][0])
    assert said[0.0] < 0.016 < 0.02 < said[0.1]


def test_the_grid_is_what_predict_says_of_each() -> None:
    truth = Truth(2, 0.02)
    table = points_of(truth.rng, 20)
    fit = step_time.fit(layout_of(), table, truth.measure(table), np.zeros(20))
    sizes, gas = np.array([3.0, 40.0]), np.array([1.0, 2.0])
    knobs = np.vstack((np.zeros(KNOBS), np.eye(KNOBS)[2], np.eye(KNOBS)[2] + np.eye(KNOBS)[4]))
    mean, sd = fit.grid(3, sizes, gas, knobs, None)
    _, to_itself = fit.grid(3, sizes[:1], gas[:1], knobs[:1], fit.reference(single(3, 3.0)))
    for m in range(2):
        for s in range(3):
            at = step_time.Points(np.array([3]), sizes[m : m + 1], gas[m : m + 1], knobs[s : s + 1])
            expected, its_sd = fit.predict(at)
            assert mean[m, s] == pytest.approx(float(expected[0]))
            assert sd[m, s] == pytest.approx(float(its_sd[0]), rel=0.02)  # but for the floor
    assert float(to_itself[0, 0]) < 1e-5


def test_settings_that_samples_outweigh_promise_nothing() -> None:
    fit = step_time.fit(
        layout_of(), points_of(np.random.default_rng(0), 0), np.zeros(0), np.zeros(0)
    )
    sizes, ones = np.array([16.0, 32.0, 1024.0]), np.ones(3)
    plain_and_set = np.vstack((np.zeros(KNOBS), np.eye(KNOBS)[0], np.eye(KNOBS)[5]))
    _, sd = fit.grid(1, sizes, ones, plain_and_set, None)
    diluted, other = (np.sqrt(sd[:, n] ** 2 - sd[:, 0] ** 2) for n in (1, 2))
    assert diluted == pytest.approx([0.02, 0.02, 0.02 / 32], rel=0.2)
    assert other == pytest.approx([0.02] * 3, rel=0.01)


def test_what_noise_hides_cannot_be_learned() -> None:
    truth = Truth(0, 0.0)
    table = points_of(truth.rng, 30)
    moves = [
        float(
            step_time.fit(layout_of(), table, truth.measure(table), np.full(30, ci95)).learnable(
                np.array([0.02])
            )[0]
        )
        for ci95 in (0.0, 0.1, 0.5)
    ]
    assert 0.014 < moves[0] < 0.02
    assert moves[1] == pytest.approx(0.02**2 / math.hypot(0.02, 0.1 / 1.96), rel=0.1)
    assert moves[2] < 0.002


def test_the_best_of_several_gains_less_than_their_sum() -> None:
    mean, sd = np.array([0.0, -0.05, 0.02, -1.0, 12.0]), np.array([1.0, 0.03, 0.01, 0.5, 1.0])
    draws = np.array([9.0, 9, 4, 16, 3])
    drawn = np.random.default_rng(0).normal(size=(16, 100_000))
    for number, count in enumerate(draws.astype(int)):
        best = (mean[number] + sd[number] * drawn[:count]).max(axis=0)
        found = expected_largest_gain(mean, sd, draws)[number]
        assert found == pytest.approx(np.maximum(best, 0).mean(), rel=0.05)
        assert found < count * math.exp(log_expected_gain(mean, sd)[number])
    one = np.exp(log_expected_gain(mean[:3], sd[:3]))
    assert expected_largest_gain(mean[:3], sd[:3], np.ones(3)) == pytest.approx(one, rel=0.02)
    half = expected_largest_gain(mean[:3], sd[:3], np.full(3, 0.5))
    assert half == pytest.approx(one / 2, rel=0.02)


def test_what_is_alike_gains_no_more_than_one_of_it() -> None:
    mean, sd = np.array([0.0, 0.0, 0.0, 0.0]), 0.03
    alone = expected_largest_gain(mean[:1], np.array([sd]), np.ones(1))[0]
    all_four = expected_largest_gain(mean[:1], np.array([sd]), np.array([4.0]))[0]
    alike = expected_largest_gain_of(mean, sd**2 * np.ones((4, 4)))
    independent = expected_largest_gain_of(mean, sd**2 * np.eye(4))
    assert alike == pytest.approx(alone, rel=0.05)
    assert independent == pytest.approx(all_four, rel=0.05) and independent > 2 * alike


def test_measured_together_neighbours_tell_of_each_other() -> None:
    truth = Truth(0, 0.05)
    table = points_of(truth.rng, 12)
    fit = step_time.fit(layout_of(), table, truth.measure(table), np.full(12, 0.1))
    sizes = np.array([40.0, 41.0, 42.0, 8.0])
    asked = step_time.Points(np.full(4, 3), sizes, np.ones(4), np.zeros((4, KNOBS)))
    reference = step_time.Points(*(getattr(table, key)[:1] for key in vars(table)))
    moved = fit.learnable_together(asked, reference)
    together = np.sqrt(np.diag(moved))
    alone = [
        fit.learnable_together(
            step_time.Points(*(getattr(asked, key)[[n]] for key in vars(asked))), reference
        )[0, 0]
        ** 0.5
        for n in range(4)
    ]
    assert (together >= np.array(alone) * 0.999).all() and together[1] > 1.1 * alone[1]
    assert moved[0, 1] > 0.9 * together[0] * together[1]
    assert moved[0, 3] < 0.95 * together[0] * together[3]


@pytest.mark.parametrize("count", [10, 400])
def test_both_ways_to_invert_agree(count: int) -> None:
    rng = np.random.default_rng(0)
    gradient, weight = rng.normal(size=(count, 80)), rng.uniform(1, 10, count)
    variance = rng.uniform(0.1, 1, 80)
    expected = np.linalg.inv(np.diag(1 / variance) + (gradient.T * weight) @ gradient)
    assert np.allclose(step_time.posterior(gradient, weight, variance), expected)


def test_the_gradient_is_that_of_the_prediction() -> None:
    layout = layout_of()
    rng = np.random.default_rng(1)
    theta = layout.prior_mean() + rng.normal(0, 0.3, len(layout.prior_mean()))
    points = points_of(rng, 12)
    _, gradient = layout.predict(theta, points)
    for column in range(len(theta)):
        step = np.zeros(len(theta))
        step[column] = 1e-6
        up, _ = layout.predict(theta + step, points)
        down, _ = layout.predict(theta - step, points)
        assert np.allclose(gradient[:, column], (up - down) / 2e-6, atol=1e-5)


def test_moving_more_is_never_believed_to_cost_less() -> None:
    offloading = (
        Strategy(2, CPU),
        Strategy(3, CPU),
        Strategy(3, CPU, CPU),
        Strategy(3, NVME, NVME),
    )
    for slots in (1, 8):
        ladder = [sum(step_time.traffic(s, slots)) for s in (*plain(2), *offloading)]
        assert ladder == sorted(ladder)


def test_tails_of_the_normal_distribution() -> None:
    z = np.array([-60.0, -35.0, -10.0, -2.0, 0.0, 3.0])
    logs = log_cdf(z)
    assert logs[3:] == pytest.approx(
        [math.log(0.0227501), math.log(0.5), math.log(0.9986501)], abs=1e-4
    )
    assert (np.diff(logs) > 0).all()
    assert logs[2] == pytest.approx(-53.2313, abs=1e-3)
    gains = log_expected_gain(z, np.ones(6))
    assert gains[4:] == pytest.approx([math.log(0.3989423), math.log(3.0003822)], abs=1e-4)
    assert (np.diff(gains) > 0).all()
    assert log_expected_gain(np.array([50.0]), np.array([2.0]))[0] == pytest.approx(math.log(50))
    assert inverse_mills_ratio(0.0) == pytest.approx(0.7978846)
    assert inverse_mills_ratio(-50.0) == 50.0
