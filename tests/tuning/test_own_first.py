"""The user's own configuration is the first trial, and profiles the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Outcome, StepFacts, TrainingCurve
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import World, failed, plan_of, ran, weightless
from testing.tuners import events_of, tuner_of

OWN = replace(ran(100.0), profile=weightless(15))


def next_trial(tuner: Tuner) -> Trial | None:
    return next(iter(tuner.next_trials(1)), None)


def kinds(run: Run) -> list[TrialKind]:
    return [trial.kind for trial in run.trials.values()]


def test_the_search_follows_at_once_and_knows_it() -> None:
    tuner, _ = tuner_of(plan_of(own_first=True))
    own = next_trial(tuner)
    assert own is not None and own.kind is TrialKind.BASELINE and own.profiles
    assert own.batch == plan_of().own_batch
    tuner.record(0, replace(OWN, training=TrainingCurve(facts=StepFacts(1, 3, (11,)))))
    searched = next_trial(tuner)
    assert searched is not None and searched.kind is TrialKind.SEARCH and not searched.profiles
    assert searched.own_steps == StepFacts(1, 3)
    assert tuner.run.baseline is own and tuner.run.best is own and tuner.run.profile is not None


@pytest.mark.parametrize("kind", ["OOM", "HOST_OOM", "TIMEOUT", "DIVERGED", "ERROR"])
def test_the_model_is_profiled_at_the_smallest_micro_batch_if_it_fails(kind: str) -> None:
    tuner, _ = tuner_of(plan_of(own_first=True))
    next_trial(tuner)
    tuner.record(0, failed(kind, "it did not train"))
    profile = next_trial(tuner)
    assert profile is not None and profile.kind is TrialKind.PROFILE
    assert (profile.stage, profile.batch.micro_batch) == (0, 1)
    tuner.record(1, replace(ran(), profile=weightless(15)))
    searched = next_trial(tuner)
    assert searched is not None and searched.kind is TrialKind.SEARCH
    assert not tuner.decisions.failure


def test_the_ladder_is_climbed_if_it_is_the_smallest_already() -> None:
    plan = plan_of(own_first=True, own_batch=BatchTriple(2, 1, 1), slots_per_trial=2)
    tuner, _ = tuner_of(plan)
    tuner.next_trials(2)
    tuner.record(0, failed("OOM"))
    [profile] = tuner.next_trials(2)
    assert profile.kind is TrialKind.PROFILE and profile.stage == 1


@pytest.mark.parametrize(
    "outcome",
    [
        replace(failed("ERROR", "NameError"), before_engine=True),
        failed("INVALID", "the script never calls deepspeed.initialize"),
    ],
)
def test_a_failure_of_any_configuration_ends_the_run(outcome: Outcome) -> None:
    tuner, _ = tuner_of(plan_of(own_first=True))
    next_trial(tuner)
    tuner.record(0, outcome)
    assert next_trial(tuner) is None and tuner.decisions.failure
    assert "your own configuration" in str(tuner.decisions.stop_reason)


def test_errors_that_differ_with_the_micro_batch_end_the_run_in_the_end() -> None:
    tuner, _ = tuner_of(plan_of(own_first=True))
    for number in range(10):
        trial = next_trial(tuner)
        if trial is None:
            break
        tuner.record(trial.id, failed("ERROR", f"error {number}"))
    assert tuner.decisions.failure and len(tuner.run.trials) == 2


def test_a_run_is_resumed_from_every_event() -> None:
    plan = plan_of("random", own_first=True, max_trials=8)
    events = events_of(plan, World(), slots=1)
    for cut in range(1, len(events)):
        tuner_of(plan, events[:cut])
