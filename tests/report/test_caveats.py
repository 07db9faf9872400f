"""What the verdict warns of: gains that are uncertain, or other than they seem."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsat.report.verdict import verdict
from dsat.values.outcome import Outcome, TrainingCurve
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import drive, ran
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


@pytest.mark.parametrize(("its", "is_said"), [(110.0, False), (180.0, True), (50.0, True)])
def test_samples_of_another_length_make_the_gain_unreliable(its: float, is_said: bool) -> None:
    def measured(samples: float, length: float) -> Outcome:
        metrics = ran(samples).metrics
        assert metrics is not None
        return replace(ran(), metrics=replace(metrics, tokens_per_second=samples * length))

    warnings = verdict(run_of((1, 8, measured(150, its)), baseline=measured(100, 100))).warnings
    said = [text for text in warnings if "so the gain is unreliable" in text]
    assert bool(said) == is_said
    if said:
        assert f"samples of t2 had {its:g} tokens on average and yours 100 (" in said[0]


class OfMicroBatch(Buckets):
    """Losses that depend on the micro batch, or on the settings."""

    def __init__(self, by: str) -> None:
        super().__init__({10: 1.5})
        self._by = by

    def outcome(self, trial: Trial) -> Outcome:
        zero = trial.overrides.get("zero_optimization", {})
        other = trial.batch.micro_batch if self._by == "micro batch" else len(zero)
        start = 5.0 + 0.1 * other
        losses = tuple(start - 0.05 * step for step in range(10))
        curve = TrainingCurve(tuple(range(1, 11)), losses)
        return replace(super().outcome(trial), training=curve)


@pytest.mark.parametrize(("by", "how"), [("micro batch", "depends"), ("settings", "may depend")])
def test_a_loss_that_depends_on_the_micro_batch_is_warned_of(by: str, how: str) -> None:
    own = BatchTriple(16, 8, 2)
    plan = finals_plan(method="asha", own_batch=own, micro_batches=(8, 16), train_batch_size=16)
    tuner, _ = tuner_of(replace(plan, ramp=False))
    drive(tuner, OfMicroBatch(by))
    run = tuner.run
    assert run.best is not None and run.best.batch.micro_batch == 16
    searched = [t for t in run.trials.values() if t.kind is TrialKind.SEARCH]
    assert {t.batch.micro_batch for t in searched} == {8, 16}
    [said] = verdict(run).warnings
    assert said.startswith(f"the loss {how} on the micro batch (negatives within a batch")
    assert said.endswith("To keep yours: --min-micro-batch 8 --max-micro-batch 8.")
