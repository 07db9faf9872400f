"""The finals, played by hand: which trial runs when, which wins, and the reported gain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dsat.run import finals as rules
from dsat.run.comparison import Comparison
from dsat.run.finals import Contestant, Finals, Role, Rules
from dsat.values import student

OWN = Contestant(1, 0.0, 0.01, train_batch_size=8)


def leader(
    trial_id: int, gain: float = 1.4, *, batch: int = 8, error: float = 0.01, **known: Any
) -> Contestant:
    return Contestant(trial_id, math.log(gain), error, train_batch_size=batch, **known)


def play(finals: Finals, speeds: Mapping[int | str, float | None], *, noise: float = 0.0) -> str:
    """Run the finals to their end, with noise in alternating directions.

    Returns:
        The trials in order: `o` is the user's own, `s` the one with its batch size, and a number is
        a leader's id.
    """
    order = ""
    ran: dict[str, int] = {}
    while (turn := finals.turn) is not None:
        letter = str(finals.repeated_id) if turn is Role.LEADER else turn.value[0]
        order += letter
        ran[letter] = ran.get(letter, 0) + 1
        speed = speeds.get(int(letter) if letter.isdigit() else letter, 1.0)
        sign = 1 if (ran[letter] + (letter == "o")) % 2 else -1
        finals.record(None if speed is None else math.log(speed) + sign * noise)
    return order


# -- who takes part


def test_if_only_one_takes_part_it_is_the_smallest_that_is_as_fast() -> None:
    tried = [
        leader(2, 1.40, batch=64, error=0.001),
        leader(3, 1.38, batch=16, error=0.001),
        leader(4, 1.39, batch=32, error=0.001),
    ]
    assert [c.trial_id for c in rules.rank_by_expectation(tried)] == [2, 4, 3]
    assert [c.trial_id for c in rules.rank_by_expectation(tried, indifference=0.01)] == [4, 2, 3]
    assert [c.trial_id for c in rules.rank_by_expectation(tried, indifference=0.02)] == [3, 2, 4]


# -- who runs, and when it is enough


def test_pairs_go_on_until_the_budget_is_spent_if_nothing_is_certain() -> None:
    finals = Finals(OWN, [leader(2)], Rules(9))
    assert play(finals, {2: 1.02}, noise=0.1) == "o22oo22o"
    assert not finals.is_better
    comparison = finals.comparison
    assert comparison is not None
    assert comparison.gain.low < 1.02 < comparison.gain.high


# -- what fails


@pytest.mark.parametrize(
    ("gain", "order"), [(1.25, "o22o"), (0.8, "o22o"), (1.4, "o2"), (0.7, "o2")]
)
def test_pairs_end_when_it_is_clear(gain: float, order: str) -> None:
    """One pair is enough for a large difference that the search's trials confirm."""
    finals = Finals(OWN, [leader(2, gain)], Rules(12))
    assert play(finals, {2: gain}, noise=0.001) == order
    assert finals.is_better is finals.is_worth_it is (gain > 1)


def test_pairs_end_when_the_gain_is_surely_worth_nothing() -> None:
    finals = Finals(OWN, [leader(2)], Rules(14, least_gain=0.02))
    assert play(finals, {2: 1.001}, noise=0.0005) == "o22o"
    assert not finals.is_better
    finals = Finals(OWN, [leader(2)], Rules(14, least_gain=None))
    assert play(finals, {2: 1.001}, noise=0.0005) == "o22o" * 3 + "o2"


def test_pairs_are_looked_at_a_few_times_only() -> None:
    """After four pairs it would be clear, but each look is a chance to be wrong."""
    finals = Finals(Contestant(1, -0.5, 0.01, train_batch_size=8), [leader(2)], Rules(20))
    for gain in (0.06, 0.14, 0.10, 0.10, 0.10):
        roles = [Role.OWN, Role.LEADER][:: -1 if len(finals.pairs) % 2 else 1]
        for role in roles:
            assert finals.turn is role
            finals.record(gain if role is Role.LEADER else 0.0)
    assert finals.over and finals.is_better


def test_one_pair_is_judged_by_the_runs_of_the_search_too() -> None:
    for own, first, second in ((0.0, 1.4, True), (0.05, 1.1, False)):
        finals = Finals(OWN, [leader(2, first)], Rules(2))
        finals.record(own)
        finals.record(math.log(1.4 if second else 1.2))
        assert finals.over and finals.comparison is not None
        assert finals.comparison.variation.freedom == 2
        assert finals.is_better == second


def test_a_large_gain_is_clear_after_one_pair_on_a_machine_that_varies() -> None:
    """Both ran 6 % slower than in the search. These two differences alone would make no gain
    certain."""
    finals = Finals(OWN, [leader(2, 1.5)], Rules(12))
    finals.record(-0.06)
    finals.record(math.log(1.5) - 0.06)
    assert finals.over and finals.comparison is not None and finals.is_better
    gain = finals.comparison.gain
    assert (gain.low, gain.high) == pytest.approx((1.5 / 1.17, 1.5 * 1.17), rel=0.02)
    assert finals.comparison.variation.sd == pytest.approx(0.06 / math.sqrt(2))


def test_ones_own_may_fail_once() -> None:
    finals = Finals(OWN, [leader(2)], Rules(9))
    for value in (None, 0.0, 0.02):
        finals.record(value)
    assert not finals.own_failed and play(finals, {2: 1.02}, noise=0.1) == "2oo22o"
    assert finals.comparison is not None


@pytest.mark.parametrize(("cost", "trials"), [(0.1, 7), (0.028, 10), (0.001, 15)])
def test_finals_take_a_part_of_the_time_of_the_search(cost: float, trials: int) -> None:
    """They take 30 % of it, but at least seven trials."""
    assert rules.budget(60, 20, cost=cost) == trials


def test_no_leader_is_left() -> None:
    finals = Finals(OWN, [leader(2)], Rules(12))
    assert play(finals, {2: None}) == "o22"
    assert finals.pick is None and finals.comparison is None and not finals.is_worth_it


# -- sizes


def test_the_users_own_batch_is_compared_too() -> None:
    finals = Finals(OWN, [leader(2, batch=64)], Rules(12), same_batch=[2])
    assert play(finals, {2: 1.25, "s": 1.2}, noise=0.001) == "o22os"
    gain = finals.same_batch_gain
    assert gain is not None
    assert gain.low < 1.2 < gain.high
    assert gain.ratio == pytest.approx(1.2, rel=0.003)
    failed = Finals(OWN, [leader(2, batch=64)], Rules(12), same_batch=[2])
    assert play(failed, {2: 1.25, "s": None}, noise=0.001) == "o22os"
    assert failed.same_batch_gain is None and failed.is_better
    few = Finals(OWN, [leader(2, batch=64)], Rules(4), same_batch=[2])
    assert play(few, {2: 1.25, "s": 1.2}, noise=0.001) == "o22o", "a second pair tells more"
    same = Finals(OWN, [leader(2, batch=64)], Rules(12))
    assert play(same, {2: 1.25}, noise=0.001) == "o22o"
    assert same.same_batch_gain is None


# -- statistics


def test_a_paired_interval_by_hand() -> None:
    pairs = [(0.01, 0.11), (0.00, 0.14), (0.03, 0.15)]
    found = Comparison.of_pairs(pairs, (-0.02, 0.9))
    assert found.mean == pytest.approx(0.12)
    # The differences are 0.02 from their mean twice, the sums 0.12, 0.14 and 0.18 are 1/300 from a
    # line twice and 2/300 once, and the own run of the search is 1/30 from the mean of the others.
    squares = 2 * 0.02**2 + 6 / 300**2 + 2 / 30**2 * 3 / 4
    spread = squares / (2 + 1 + 1)
    assert found.standard_error == pytest.approx(math.sqrt(spread / 3))
    assert found.freedom == 4
    assert found.variation.sd == pytest.approx(math.sqrt(spread / 2))
    margin = 3.4954 * math.sqrt(spread / 3)  # the quantile of 97.5 %
    assert found.gain.high == pytest.approx(math.exp(0.12 + margin), rel=1e-3)
    assert found.is_better
    assert found.is_clear(None), "0.12 is 8.4 standard errors, and 4.6 are asked for"


def test_a_steady_drift_of_the_machine_is_no_noise() -> None:
    """The noise is that of a regression on the configuration and the number of the pair."""
    runs = np.random.default_rng(1).normal(size=(5, 2))
    at, is_second = np.indices(runs.shape)
    known = np.stack([np.ones(10), at.ravel(), is_second.ravel()], axis=1)
    squares = np.linalg.lstsq(known, runs.ravel(), rcond=None)[1]
    for drift in (0.0, 10.0):
        pairs = [(first, second) for first, second in (runs + drift * at).tolist()]
        found = Comparison.of_pairs(pairs, (0.0, 0.0))
        assert found.freedom == 10 - 3
        assert found.variation.sd == pytest.approx(math.sqrt(squares.item() / 7))


@pytest.mark.parametrize(
    ("first", "count", "freedom", "counts"),
    [
        (0.03, 3, 4, True),
        (-0.4, 3, 3, False),
        (0.03, 2, 2, True),
        (-0.4, 2, 2, False),
        (0.03, 4, 5, False),
        (-0.4, 4, 5, False),
    ],
)
def test_the_own_run_of_the_search_counts_beside_few_pairs_if_it_is_like_them(
    first: float, count: int, freedom: int, counts: bool
) -> None:
    owns, differences = (0.01, 0.05, -0.03, 0.0), (0.10, 0.14, 0.12, 0.11)
    pairs = [(own, own + d) for own, d in zip(owns, differences, strict=True)][:count]
    found, far_off = (Comparison.of_pairs(pairs, (own, 0.9)) for own in (first, -9.0))
    assert found.freedom == freedom
    assert (found.standard_error != far_off.standard_error) == counts


def comparisons(
    pairs: int, variation: float, *, cold: float = 0.0, is_alone: bool = True
) -> list[Comparison]:
    """Return comparisons of equal configurations.

    The search's run of the first is slower by `cold`; that of the second counts if `is_alone`.
    """
    runs = np.random.default_rng(7).normal(scale=variation, size=(2000, pairs + 1, 2))
    runs[:, -1, 0] -= cold
    before = [(own, leader if is_alone else None) for own, leader in runs[:, -1].tolist()]
    pairs_of = [[(first, second) for first, second in each] for each in runs[:, :-1].tolist()]
    return [Comparison.of_pairs(*each) for each in zip(pairs_of, before, strict=True)]


@pytest.mark.parametrize(
    ("variation", "least"), [(0.005, 0.96), (0.02, 0.96), (0.05, 0.96), (0.10, 0.91)]
)
@pytest.mark.parametrize(("cold", "is_alone"), [(0.0, True), (0.2, True), (0.0, False)])
def test_intervals_of_few_pairs_hold_and_become_narrower(
    variation: float, least: float, cold: float, is_alone: bool
) -> None:
    """One pair is judged by an assumed variation, so two pairs of a noisy machine may tell less."""
    margins = []
    for pairs in (1, 2, 3):
        found = comparisons(pairs, variation, cold=cold, is_alone=is_alone)
        held = sum(abs(each.mean) <= each.margin for each in found)
        assert held / len(found) >= least, pairs
        margins.append(np.median([each.margin for each in found]))
    assert margins[0] * (1.03 if variation < 0.03 else 1.3) > margins[1] > margins[2]


def test_a_slow_first_trial_does_not_hide_a_gain_of_two_pairs() -> None:
    before = (math.log(0.85), math.log(1.2))
    pairs = [(0.0, math.log(1.2)), (0.004, math.log(1.2) - 0.002)]
    assert Comparison.of_pairs(pairs, before).is_better


def test_a_run_beside_others_does_not_widen_the_interval() -> None:
    """The leader ran at 0.8 of its speed during other trials, while its pairs run alone."""
    for alone in (True, False):
        finals = Finals(OWN, [leader(2, 0.96, ran_alone=alone)], Rules(2))
        assert play(finals, {2: 1.2}) == "o2"
        assert finals.is_better is not alone


@pytest.mark.parametrize(
    ("level", "known"),
    [
        (0.95, {1: 12.706, 2: 4.3027, 5: 2.5706, 30: 2.0423, 120: 1.9799}),
        (0.975, {1: 25.452, 2: 6.2053, 10: 2.634, 40: 2.329, 120: 2.270}),
        (0.99, {1: 63.657, 10: 3.169, 30: 2.750, 40: 2.704, 120: 2.617}),
    ],
)
def test_quantiles(level: float, known: dict[int, float]) -> None:
    assert {n: student.half_width(level, n) for n in known} == pytest.approx(known, rel=3e-4)


@pytest.mark.parametrize(("second", "wins"), [(1.4, 3), (1.02, None)])
def test_a_failed_pick_leaves_the_place_to_what_is_surely_better(
    second: float, wins: int | None
) -> None:
    """No trials are left for another pair, so the search's own measurements decide."""
    finals = Finals(OWN, [leader(2, 1.5), leader(3, second)], Rules(3))
    assert "2" in play(finals, {2: None})
    assert finals.comparison is None
    assert (finals.pick and finals.pick.trial_id) == wins


@pytest.mark.parametrize(("error", "chosen"), [(0.03, 3), (0.002, 4)])
def test_if_only_one_takes_part_luck_does_not_make_a_large_batch(error: float, chosen: int) -> None:
    tried = [
        leader(2, 1.33, batch=16, error=error),
        leader(3, 1.38, batch=32, error=error),
        leader(4, 1.41, batch=64, error=error),
        leader(5, 1.36, batch=128, error=error),
        leader(6, 1.10, batch=8, error=error),
    ]
    assert rules.rank_by_expectation(tried, indifference=0.02)[0].trial_id == chosen


def test_the_luckiest_of_many_needs_more_than_one_alone() -> None:
    """18 % is certain enough for one candidate, but not for the best of fifteen, measured once
    each."""
    for count, wins in ((0, True), (14, False)):
        lucky = [leader(2 + n, 1.18, error=0.001) for n in range(count + 1)]
        own = Contestant(1, 0.0, 0.001, train_batch_size=8)
        finals = Finals(own, [leader(99), *lucky], Rules(2))
        finals.record(0.0)
        finals.record(None)
        assert finals.over and (finals.pick is not None) is wins
