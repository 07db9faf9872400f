"""What the verdict warns of: gains that are uncertain, or other than they seem."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsat.report.verdict import verdict
from dsat.values.outcome import Outcome, StepFacts, TrainingCurve
from testing.helpers import drive, plan_of, ran
from tests.report.test_summary import run_of
from tests.tuning.test_finals_phase import Buckets, finals_plan, tuner_of


@pytest.mark.parametrize(("spread", "is_said"), [(0.002, False), (0.4, True)])
def test_a_wide_interval_of_the_finals_is_warned_of(spread: float, is_said: bool) -> None:
    tuner, _ = tuner_of(finals_plan(finals=2))
    drive(tuner, Buckets({10: 3.0}, spread=spread))
    run = tuner.run
    assert run.finals is not None and run.finals.comparison is not None
    found = run.finals.comparison.gain
    assert (found.high > 2 * found.low) == is_said
    said = [text for text in verdict(run).warnings if "may be anything from" in text]
    assert bool(said) == is_said
    if said:
        assert f"from {found.low:.2f}x to {found.high:.2f}x" in said[0] and "--finals" in said[0]


@pytest.mark.parametrize(
    ("its", "error", "is_said"),
    [
        (110.0, 0.0, False),
        (180.0, 0.1, True),
        (50.0, 0.1, True),
        (180.0, 0.2, False),  # by chance, perhaps
        (180.0, None, False),
    ],
)
@pytest.mark.parametrize("metric", ["throughput", "tokens_per_second"])
def test_samples_of_another_length_are_warned_of(
    its: float, error: float | None, is_said: bool, metric: str
) -> None:
    def measured(samples: float, length: float) -> Outcome:
        metrics = ran(samples).metrics
        assert metrics is not None
        curve = TrainingCurve(facts=StepFacts(1, tokens_error=error))
        metrics = replace(metrics, tokens_per_second=samples * length)
        return replace(ran(), metrics=metrics, training=curve)

    tried, plan = (1, 8, measured(300, its)), plan_of(metric=metric)
    warnings = verdict(run_of(tried, baseline=measured(100, 100), plan=plan)).warnings
    said = [text for text in warnings if "tokens on average" in text]
    assert bool(said) == is_said
    if said:
        assert f"samples of t2 had {its:g} tokens on average and yours 100: " in said[0]
        assert (" The gain is unreliable. " in said[0]) == (metric == "tokens_per_second")
