"""Statistics of step times: valid intervals, and steps that an outside event slowed down."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dsat.in_trial.steps import relative_ci95, steps_wanted, summarize


def test_nothing_is_known_of_two_steps_and_equal_ones_are_certain() -> None:
    assert relative_ci95([5.0, 6.0]) == math.inf
    assert relative_ci95([7.0] * 5) == 0.0


@pytest.mark.parametrize("count", [5, 60])
def test_the_interval_is_that_of_the_posterior(count: int) -> None:
    """Compared with draws from the same posterior, made with matrices and random numbers
    instead."""
    rng = np.random.default_rng(count)
    values = 10 + np.cumsum(rng.normal(size=count)) * 0.05 + rng.normal(size=count) * 0.1
    places = np.arange(count)
    ones, freedom = np.ones(count), count - 1
    draws, weights = [], []
    for r in np.linspace(0.0, 0.97, 20):
        inverse = np.linalg.inv(r ** np.abs(places[:, None] - places[None, :]))
        weight = ones @ inverse @ ones
        centre = ones @ inverse @ values / weight
        rest = (values - centre) @ inverse @ (values - centre)
        _, log_det = np.linalg.slogdet(inverse)
        weights.append(
            0.5 * (log_det - np.log(weight) - freedom * np.log(rest) - np.log(1 - r * r))
        )
        draws.append(centre + rng.standard_t(freedom, 20_000) * math.sqrt(rest / freedom / weight))
    shares = np.exp(np.array(weights) - max(weights))
    chosen = rng.choice(20, 20_000, p=shares / shares.sum())
    drawn = np.array(draws)[chosen, np.arange(20_000)]
    expected = np.quantile(np.abs(drawn - values.mean()), 0.95) / values.mean()
    assert relative_ci95(list(values)) == pytest.approx(expected, rel=0.05)


def test_steps_that_hang_together_say_less_than_independent_ones() -> None:
    rng = np.random.default_rng(0)
    drifting = 10 + np.sin(np.arange(40) / 6)
    assert relative_ci95(list(drifting)) > 1.5 * relative_ci95(list(rng.permutation(drifting)))


def test_a_rare_step_far_beyond_the_others_is_an_accident() -> None:
    values = [10.0, 10.1, 9.9, 10.0, 30.0, 10.1, 9.9, 10.0, 10.1, 9.9]
    found = summarize(values)
    assert found.accidents == (4,)
    assert found.mean == pytest.approx(10.0)
    assert found.lost == pytest.approx(20 / 90, rel=0.01)


@pytest.mark.parametrize(
    ("values", "may_be"),
    [
        ([10.0, 10.1, 9.9, 30.0], None),  # one of four is not rare
        ([10.0, 10.1, 9.9] * 2 + [10.0, 10.1, 30.0], None),  # nor one of nine
        ([10.0] * 7 + [30.0] + [10.0] * 7 + [30.0], None),  # each eighth waits for the loader
        ([10.0] * 9 + [30.0], [True] * 9 + [False]),
        ([10.0, 11.0, 9.0, 10.5, 9.5, 10.0, 11.0, 9.0, 10.0, 13.0], None),  # within their spread
    ],
)
def test_what_belongs_to_the_training_is_no_accident(
    values: list[float], may_be: list[bool] | None
) -> None:
    found = summarize(values, may_be)
    assert found.accidents == ()
    assert found.mean == pytest.approx(sum(values) / len(values))


@pytest.mark.parametrize(
    ("count", "ci95", "most", "wanted"),
    [
        (5, 0.03, 20, 10),
        (12, 0.05, 20, 20),
        (3, math.inf, 20, 4),
        (5, 9, 50, 10),
    ],
)
def test_how_many_steps_are_wanted(count: int, ci95: float, most: int, wanted: int) -> None:
    assert steps_wanted(count, ci95, most) == wanted
