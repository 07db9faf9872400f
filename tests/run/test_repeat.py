"""Without finals, the user's own configuration is measured a second time."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.searching import search
from dsat.run.run import Run
from dsat.show.view import RunView
from dsat.space.plan import Plan
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial
from testing.helpers import plan_of, ran, weightless
from testing.scenarios import User
from testing.world import World

PLAN = replace(plan_of("random", max_trials=20), finals=0)


def run(plan: Plan = PLAN, *, sd: float = 0.0, later: float = 1.0, seed: int = 0) -> Run:
    """Return a run in which no configuration is faster.

    Args:
        sd: relative standard deviation between runs.
        later: speed of all trials but the first.
    """
    noise = random.Random(seed)

    def outcome_of(trial: Trial) -> Outcome:
        value = 100 * noise.lognormvariate(0, sd) * (later if trial.id else 1.0)
        return replace(ran(value), profile=weightless(15))

    return search(plan, outcome_of)


@pytest.mark.parametrize(
    ("options", "count"),
    [("--finals 0", 1), ("--finals 0 --max-trials 11", 0), ("--finals 4", 0), ("", 0)],
)
def test_it_is_repeated_once_in_long_runs_without_finals(
    user: User, options: str, count: int
) -> None:
    told = user.tunes("--max-trials", 20, *options.split(), method="random")
    repeats = [n for n, row in enumerate(told.trials) if row["kind"] == "repeat"]
    assert repeats == [5] * count
    assert all(told.trials[n]["overrides"] == told.trials[0]["overrides"] for n in repeats)


@pytest.mark.slow
def test_noise_is_taken_for_a_gain_less_often() -> None:
    """Without the repeat it is in 72 of the first 100 runs, with the repeat in 31."""
    claims = sum((found := run(sd=0.2, seed=s)).best is not found.baseline for s in range(40))
    assert claims <= 16


def test_a_repeat_beside_the_first_trial_of_a_cold_machine_widens_what_is_said() -> None:
    cold, steady = run(later=1.3), run()
    gains = [each.gain_of(each.trials[1]) for each in (cold, steady)]
    assert gains[0] is not None and gains[1] is not None
    assert gains[0].high / gains[0].low > 2 * gains[1].high / gains[1].low


def test_it_runs_alone_where_trials_run_side_by_side(tmp_path: Path) -> None:
    user = User(tmp_path, World(at_once=3))
    user.has()
    told = user.tunes("--max-trials", 20, "--finals", 0, method="random")
    running: set[int] = set()
    beside: list[int] = []
    for event in user.events():
        if event["event"] == "proposed":
            running.add(event["trial"]["id"])
        elif event["event"] == "finished":
            running.discard(event["trial_id"])
        kinds = [told.trials[n]["kind"] for n in running]
        if "repeat" in kinds:
            beside.append(len(kinds) - 1)
    assert beside and not any(beside)


def test_a_report_compares_a_trial_with_the_own_configuration_a_few_times() -> None:
    """Else reports of a thousand trials take ten seconds: they name the best one fifty times."""
    found = run()
    with mock.patch.object(Run, "gain_of", autospec=True, side_effect=Run.gain_of) as compared:
        RunView(found)
    assert compared.call_count < 4 * len(found.trials)
