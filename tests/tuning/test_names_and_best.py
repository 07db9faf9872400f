"""What trials are called, and which of them is the best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsat.space.plan import Plan
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import (
    World,
    drive,
    failed,
    plan_of,
    ran,
)
from testing.tuners import begun, tuner_of


def test_trial_names_say_what_they_are_and_are_unique() -> None:
    tuner, _ = tuner_of(plan_of("random", max_trials=60, zero_stages=(0, 1, 2, 3)))
    drive(tuner, World(), slots=4)
    trials = tuner.run.trials.values()
    assert len({trial.name for trial in trials}) == len(trials) > 30
    for trial in trials:
        kind = "" if trial.kind is TrialKind.SEARCH else f"{trial.kind.value}_"
        stem = f"{kind}z{trial.stage}_gas{trial.batch.gas}_tmbspg{trial.batch.micro_batch}"
        assert trial.name.startswith(stem)
        assert trial.name == stem or len(trial.name) == len(stem) + 5


def _recorded(plan: Plan, *values: tuple[BatchTriple, Outcome]) -> Run:
    """A run with these trials in this order; the first is the baseline."""
    run = Run([{"event": "start", "plan": plan.to_json(), "info": {}}])
    profile = Trial(0, TrialKind.PROFILE, "profile", 0, BatchTriple(1, 1, 1), {})
    run.apply({"event": "proposed", "trial": profile})
    run.apply({"event": "finished", "trial_id": 0, "outcome": ran(1e6)})
    for trial_id, (batch, outcome) in enumerate(values, start=1):
        kind = TrialKind.BASELINE if trial_id == 1 else TrialKind.SEARCH
        trial = Trial(trial_id, kind, f"t{trial_id}", 1, batch, batch.config())
        run.apply({"event": "proposed", "trial": trial})
        run.apply({"event": "finished", "trial_id": trial_id, "outcome": outcome})
    return run


@pytest.mark.parametrize(
    ("changes", "best"),
    [
        ({}, 4),
        ({"train_batch_size": 12}, 2),
        ({"divisible_by": 4}, 3),
        ({"train_batch_size": 16, "divisible_by": 8}, None),
    ],
)
def test_the_best_keeps_to_what_was_demanded(changes: dict[str, Any], best: int | None) -> None:
    run = _recorded(
        plan_of(**changes),
        (BatchTriple(6, 3, 1), ran(20)),
        (BatchTriple(12, 3, 2), ran(30)),
        (BatchTriple(16, 4, 2), ran(25)),
        (BatchTriple(10, 5, 1), ran(40)),
        (BatchTriple(12, 3, 2), failed("OOM")),
    )
    assert (None if run.best is None else run.best.id) == best
    assert run.best_value == (None if best is None else run.value(run.trials[best]))


def test_a_baseline_of_another_batch_size_is_measured_but_never_the_best() -> None:
    plan = plan_of(train_batch_size=16, own_batch=BatchTriple(4, 4, 1), max_trials=6)
    tuner, _ = begun(plan, ran(1000.0))
    while trials := tuner.next_trials(1):
        tuner.record(trials[0].id, ran(1.0))
    assert tuner.run.baseline is not None
    assert tuner.run.value(tuner.run.baseline) == 1000.0
    assert tuner.run.best is not None and tuner.run.best_value == 1.0


def test_the_best_of_a_latency_is_the_smallest_and_ties_keep_the_first() -> None:
    batch = BatchTriple(4, 4, 1)
    run = _recorded(
        plan_of(metric="latency"),
        (batch, ran(30, "latency")),
        (batch, ran(40, "latency")),
        (batch, ran(20, "latency")),
        (batch, ran(20, "latency")),
        (batch, failed("ERROR")),
    )
    assert run.best is not None and run.best.id == 3
    assert run.trials_since_best == 2
    kinds = [outcome.kind for outcome in run.outcomes.values()]
    assert (kinds.count(OutcomeKind.OK), kinds.count(OutcomeKind.ERROR)) == (5, 1)


def test_a_run_skips_events_of_a_kind_it_does_not_know() -> None:
    run = _recorded(plan_of())
    run.apply({"event": "from the future", "elapsed_s": 2.0})
    assert run.running_s == 2.0


def test_stage_0_said_and_unsaid_is_one_configuration() -> None:
    def micro_batches(plan: Plan) -> list[int]:
        tuner, _ = tuner_of(plan)
        drive(tuner, World(), slots=1)
        return [t.batch.micro_batch for t in tuner.run.trials.values()]

    plan = plan_of(zero_stages=(0,), max_trials=40)
    assert "zero_optimization" not in plan.base_config
    searched = micro_batches(plan)[1]
    again = micro_batches(replace(plan, own_batch=BatchTriple(searched, searched, 1)))
    assert again.count(searched) == 1
