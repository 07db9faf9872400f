"""How much of the search's time trials take."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from dsat.run.run import Run
from dsat.run.trial_costs import TrialCosts
from dsat.values.outcome import Outcome
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import failed, plan_of, ran

OWN = Trial(1, TrialKind.BASELINE, "own", 1, BatchTriple(4, 4, 1), {})


def took(seconds: float) -> Outcome:
    """Return a success with steps of one second."""
    found = ran()
    assert found.metrics is not None
    return replace(found, metrics=replace(found.metrics, latency=1000.0), duration_s=seconds)


class Ran:
    """A run whose baseline took ten seconds; `beside` trials run during the next one."""

    def __init__(self, beside: int = 0, longest_s: float | None = None) -> None:
        self._longest_s = longest_s
        self.baseline = OWN
        self.outcomes = {OWN.id: took(10.0)}
        self.neighbours = {2: beside}
        self.earlier: set[int] = set()

    def longest_s(self, kind: TrialKind) -> float | None:
        return self._longest_s and self._longest_s / (2 if kind is TrialKind.SEARCH else 1)


@pytest.mark.parametrize(
    ("ended", "kind", "beside", "counted_s"),
    [
        (took(12.0), TrialKind.SEARCH, 0, 12.0),
        (took(12.0), TrialKind.SEARCH, 3, 3.0),  # side by side they share the time
        # A rank that hangs costs no more than a trial.
        (replace(failed("TIMEOUT"), duration_s=1800.0), TrialKind.SEARCH, 0, 10.0),
        (replace(failed("OOM"), duration_s=4.0), TrialKind.SEARCH, 0, 4.0),
        (took(12.0), TrialKind.FINAL, 0, 0.0),  # finals are not the search
    ],
)
def test_what_a_trial_takes_of_the_time_of_the_search(
    ended: Outcome, kind: TrialKind, beside: int, counted_s: float
) -> None:
    run = Ran(beside)
    costs = TrialCosts(plan_of(), cast(Run, run))
    costs.update(OWN, run.outcomes[OWN.id])
    before = costs.left_s
    costs.update(replace(OWN, id=2, kind=kind, name="2"), ended)
    assert before - costs.left_s == pytest.approx(counted_s)


@pytest.mark.parametrize("step_s", [0.5, 2.0, 16.0, 40.0])
def test_long_steps_are_measured_in_fewer(step_s: float) -> None:
    """The baseline measured 22 steps of one second; a search trial may measure for 20 s."""
    run = Ran(longest_s=40.0)
    costs = TrialCosts(plan_of(), cast(Run, run))
    found = took(24.0)
    assert found.metrics is not None
    costs.update(OWN, replace(found, metrics=replace(found.metrics, num_steps=22)))
    warm_up, fewest = 2, 5
    measured = min(22, max(20 / step_s, min(fewest, 60 / step_s), 1))
    assert costs.trial_s(step_s) == pytest.approx((warm_up + measured) * step_s, rel=0.25)


@pytest.mark.parametrize(("longest_s", "step_s"), [(20.0, 12.0), (120.0, 24.0)])
def test_no_trial_begins_whose_five_steps_are_too_long_for_the_finals(
    longest_s: float, step_s: float
) -> None:
    costs = TrialCosts(plan_of(), cast(Run, Ran(longest_s=longest_s)))
    assert list(costs.are_too_long([0.9 * step_s, 1.1 * step_s])) == [False, True]
