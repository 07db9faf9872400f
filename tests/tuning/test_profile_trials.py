"""What becomes of a run whose profile trial fails, and of a script that fails in every trial."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dsat.report.verdict import verdict
from dsat.space.overrides import FORCE, GATHER, overrides_for
from dsat.space.plan import Plan
from dsat.tuning.run import HOPELESS_AFTER
from dsat.tuning.strategies import make_space
from dsat.values.outcome import Outcome, OwnOptimizer
from dsat.values.trial import BatchTriple, TrialKind
from testing.helpers import (
    Event,
    World,
    drive,
    failed,
    plan_of,
    profiled,
    ran,
    weightless,
)
from testing.tuners import ONE_LINEAGE, begun, tuner_of


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("OOM", "ran out of memory"),
        ("HOST_OOM", "ran out of host memory"),
        ("ERROR", "failed"),
        ("TIMEOUT", "timed out"),
        ("INVALID", "could not be measured"),
        ("DIVERGED", "diverged"),
        ("CANCELED", "was canceled"),
    ],
)
def test_a_failed_profile_ends_the_run(kind: str, said: str) -> None:
    # With the smallest micro batch, which is the user's own as well, and in the only stage: nothing
    # else is to be tried.
    tuner, journal = tuner_of(plan_of(own_batch=BatchTriple(1, 1, 1), zero_stages=(0,)))
    tuner.next_trials(1)
    tuner.record(0, replace(failed(kind, "it broke"), profile=weightless(15)))
    assert tuner.decisions.failure and tuner.finished
    assert tuner.next_trials(1) == []
    tuner.stop()
    assert journal.events[-1]["reason"] == f"the profile trial {said}: it broke"


def _climbing(**changes: Any) -> Plan:
    """Slots with memory of their own, on which the user trains in stage 1."""
    base = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"}}
    return plan_of(**{"base_config": base, "offload_helps": True, "slots_per_trial": 2, **changes})


def test_a_model_that_does_not_fit_climbs_the_ladder() -> None:
    tuner, journal = tuner_of(_climbing(max_trials=30))
    profiles = []
    for kind in (
        "OOM",
        "OOM",
        "OOM",
        "ERROR",
    ):  # an operator may not compile: that is no reason to stop
        (trial,) = tuner.next_trials(2)
        profiles.append(trial)
        tuner.record(trial.id, failed(kind))
    (last,) = tuner.next_trials(2)
    assert [trial.kind for trial in [*profiles, last]] == [TrialKind.PROFILE] * 5
    climbed = [trial.strategy for trial in [*profiles, last]]
    assert climbed == ["z1", "z2", "z2_offload", "z3_offload", "z3_offload"]
    assert [trial.batch.micro_batch for trial in [*profiles, last]] == [1, 1, 1, 1, 4]
    buckets = {"reduce_bucket_size": 10**6}
    offload = {"offload_optimizer": {"device": "cpu"}}
    zero = {"stage": 3, GATHER: True, **offload, **buckets}
    assert last.overrides["zero_optimization"] == zero
    tuner.record(last.id, profiled(weightless(15)))
    drive(tuner, World(), slots=2)
    kinds = [trial.kind for trial in tuner.run.trials.values()]
    assert TrialKind.BASELINE not in kinds, "it is known not to fit"
    searched = {t.strategy for t in tuner.run.trials.values() if t.kind is TrialKind.SEARCH}
    assert searched == {"z3_offload", "z3_offload_param"}
    assert tuner.run.best is not None
    resumed, _ = tuner_of(tuner.plan, journal.events)
    assert resumed.run.trials.keys() == tuner.run.trials.keys()


def test_the_top_of_the_ladder_ends_the_run() -> None:
    tuner, _ = tuner_of(_climbing(own_batch=BatchTriple(1, 1, 1)))
    while trials := tuner.next_trials(2):
        tuner.record(trials[0].id, failed("OOM", "too large"))
    assert [trial.strategy for trial in tuner.run.trials.values()] == [
        *("z1", "z2", "z2_offload", "z3_offload", "z3_offload_param")
    ]
    assert tuner.decisions.failure
    assert tuner.decisions.stop_reason == "the profile trial ran out of memory: too large"


def test_a_timeout_is_no_reason_to_climb() -> None:
    tuner, _ = tuner_of(_climbing())
    tuner.next_trials(2)
    tuner.record(0, failed("TIMEOUT"))
    assert tuner.decisions.failure


def test_a_scripts_own_optimizer_may_be_offloaded() -> None:
    base = {"zero_optimization": {"stage": 2}}
    tuner, _ = tuner_of(_climbing(base_config=base))
    tuner.next_trials(2)
    tuner.record(0, failed("OOM"))
    (trial,) = tuner.next_trials(2)
    assert trial.overrides["zero_force_ds_cpu_optimizer"] is False
    assert trial.overrides["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


@pytest.mark.parametrize(
    ("own", "replaced", "expected"),
    [({}, False, False), ({}, True, None), ({FORCE: True}, False, None)],
)
def test_accelerate_and_the_user_decide_on_an_offloaded_optimizer(
    own: dict[str, bool], replaced: bool, expected: bool | None
) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}}
    base = {"zero_optimization": {"stage": 2, **offload}, **own}
    plan = plan_of(base_config=base, zero_stages=(1, 2))
    space = make_space(
        plan, replace(weightless(15), optimizer=OwnOptimizer(moves_to_host=replaced))
    )
    for branch in space.branches:
        settings = branch.settings(0)
        assert overrides_for(settings, space.batch(4, settings)).get(FORCE) is expected


def test_switches_of_the_script_are_part_of_a_trial() -> None:
    changes = {**ONE_LINEAGE, "switches": {"gradient_checkpointing": False}}
    tuner, _ = begun(plan_of(**changes, own_batch=BatchTriple(8, 8, 1)))
    trials = tuner.next_trials(9)
    assert {t.kind: t.script_args for t in [tuner.run.trials[0], trials[0]]} == {
        TrialKind.PROFILE: {"gradient_checkpointing": False},
        TrialKind.BASELINE: {"gradient_checkpointing": False},
    }
    # The same configuration without checkpointing is the baseline, with it another trial.
    assert [t.script_args for t in trials[1:]] == [{"gradient_checkpointing": True}]
    assert "gradient_checkpointing" not in json.dumps(trials[1].overrides)


def test_a_profile_that_reported_nothing_ends_the_run() -> None:
    tuner, _ = tuner_of(plan_of())
    tuner.next_trials(1)
    tuner.record(0, ran())
    assert tuner.decisions.failure


@pytest.mark.parametrize(
    ("metric", "flops", "fails"),
    [("FLOPS_per_gpu", 0.0, True), ("FLOPS_per_gpu", 1.0, False), ("throughput", 0.0, False)],
)
def test_a_model_whose_flops_were_not_counted(metric: str, flops: float, fails: bool) -> None:
    tuner, _ = tuner_of(plan_of(metric=metric))
    tuner.next_trials(1)
    profile = replace(weightless(15), flops_per_sample=flops)
    tuner.record(0, profiled(profile))
    assert bool(tuner.decisions.failure) == fails
    assert ("--metric throughput" in (tuner.decisions.stop_reason or "")) == fails


@pytest.mark.parametrize("tokens", [None, 1e5])
def test_a_script_whose_tokens_were_not_counted(tokens: float | None) -> None:
    tuner, _ = tuner_of(plan_of(metric="tokens_per_second"))
    tuner.next_trials(1)
    measured = ran(1.0).metrics
    assert measured is not None
    measured = replace(measured, tokens_per_second=tokens)
    tuner.record(0, replace(profiled(weightless(15)), metrics=measured))
    assert bool(tuner.decisions.failure) == (tokens is None)
    assert ("no tokens could be counted" in (tuner.decisions.stop_reason or "")) == (tokens is None)


def test_a_profile_that_crashes_is_tried_again_with_the_users_own_micro_batch() -> None:
    events: list[Event] = []
    for outcome in (profiled(weightless(15)), failed("ERROR", "broken too")):
        tuner, journal = tuner_of(plan_of(own_batch=BatchTriple(4, 4, 1)))
        [first] = tuner.next_trials(3)
        assert first.batch.micro_batch == 1
        tuner.record(0, failed("ERROR", "batch normalisation needs more"))
        [again] = tuner.next_trials(3)
        assert (again.id, again.kind, again.batch.micro_batch) == (1, TrialKind.PROFILE, 4)
        assert tuner.next_trials(3) == []
        tuner.record(1, outcome)
        assert (tuner.decisions.failure is None) is outcome.ok
        assert [t.kind for t in tuner.next_trials(1)] == [TrialKind.BASELINE] * outcome.ok
        events = journal.events
        resumed, _ = tuner_of(plan_of(own_batch=BatchTriple(4, 4, 1)), events)
        assert resumed.run.trials == tuner.run.trials
        assert resumed.decisions.stop_reason == tuner.decisions.stop_reason


@pytest.mark.parametrize("kind", ["ERROR", "INVALID"])
def test_a_run_in_which_everything_fails_ends_early(kind: str) -> None:
    tuner, _ = begun(plan_of(max_trials=40))
    while trials := tuner.next_trials(1):
        tuner.record(trials[0].id, failed(kind, "a bug in the fourth step"))
    assert len(tuner.run.trials) == 1 + HOPELESS_AFTER
    assert tuner.decisions.stop_reason == "every trial failed, and none ran out of memory"


@pytest.mark.parametrize("hope", [ran(1.0), failed("OOM"), failed("TIMEOUT")])
def test_one_trial_that_did_not_fail_so_is_hope(hope: Outcome) -> None:
    tuner, _ = begun(plan_of(max_trials=12))
    [first] = tuner.next_trials(1)
    tuner.record(first.id, hope)
    while trials := tuner.next_trials(1):
        tuner.record(trials[0].id, failed("ERROR"))
    assert len(tuner.run.trials) > 1 + HOPELESS_AFTER
    assert tuner.decisions.stop_reason == "every configuration was tried"


def test_a_search_in_which_nothing_ran_found_nothing_out() -> None:
    tuner, _ = begun(plan_of(max_trials=12))
    tuner.record(tuner.next_trials(1)[0].id, ran(1.0))
    assert "nothing else was measured yet" in verdict(tuner.run).headline
    while trials := tuner.next_trials(1):
        tuner.record(trials[0].id, failed("ERROR", "the output folder exists"))
    shown = verdict(tuner.run)
    assert "nothing else ran" in shown.headline
    assert any("the output folder exists" in text for text in shown.warnings)


def test_too_large_a_micro_batch_for_the_data_shrinks() -> None:
    tuner, _ = begun(plan_of(max_trials=30, zero_stages=(1,)))
    short = replace(failed("INVALID", "the script ended"), smaller_may_run=True)
    while trials := tuner.next_trials(1):
        fits = trials[0].batch.micro_batch <= 3
        tuner.record(trials[0].id, ran(trials[0].batch.micro_batch) if fits else short)
    assert tuner.run.best is not None
    assert tuner.run.best.batch.micro_batch == 3


def test_an_error_before_the_engine_is_not_tried_with_another_batch() -> None:
    tuner, _ = tuner_of(plan_of(own_batch=BatchTriple(4, 4, 1)))
    tuner.next_trials(1)
    early = replace(failed("ERROR", "No module named 'nonsense'"), before_engine=True)
    tuner.record(0, early)
    assert tuner.next_trials(1) == [] and tuner.decisions.failure
    assert "nonsense" in (tuner.decisions.stop_reason or "")


@pytest.mark.parametrize(
    ("second", "profiled_after"),
    [("the same error", False), (None, True)],
    ids=["the script's own error", "what only stage 0 forbids"],
)
def test_what_deepspeed_refuses_at_stage_0_is_tried_with_the_other_stages(
    second: str | None, profiled_after: bool
) -> None:
    tuner, _ = tuner_of(plan_of(zero_stages=(0, 1, 2, 3), own_batch=BatchTriple(1, 1, 1)))
    tuner.next_trials(1)
    refused = replace(
        failed("ERROR", "the same error"),
        detail='  File "train.py", line 3\n  File "/x/deepspeed/runtime/engine.py", line 9\n',
    )
    tuner.record(0, refused)
    (trial,) = tuner.next_trials(1)
    assert (trial.kind, trial.stage) == (TrialKind.PROFILE, 1)
    tuner.record(1, profiled(weightless(15)) if second is None else replace(refused))
    stages = {trial.stage for trial in tuner.next_trials(3)}
    assert (tuner.decisions.failure is None) is profiled_after
    assert bool(stages) is profiled_after and 0 not in stages
