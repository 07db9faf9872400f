"""The first trials: the user's own configuration, and what profiles the model if that fails."""

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
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Outcome, OwnOptimizer, StepFacts, TrainingCurve
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import World, drive, failed, plan_of, profiled, ran, weightless
from testing.tuners import ONE_LINEAGE, begun, tuner_of

ONE_SAMPLE = BatchTriple(1, 1, 1)


def next_trial(tuner: Tuner) -> Trial | None:
    return next(iter(tuner.next_trials(tuner.plan.slots_per_trial)), None)


def played(plan: Plan, *outcomes: Outcome) -> tuple[Tuner, list[Trial]]:
    """A tuner after these outcomes of its first trials, and the trials with the one after them."""
    tuner, _ = tuner_of(plan)
    trials = []
    for outcome in outcomes:
        trial = next_trial(tuner)
        assert trial is not None
        trials.append(trial)
        tuner.record(trial.id, outcome)
    last = next_trial(tuner)
    return tuner, [*trials, last] if last else trials


def profiled_by_own(**changes: Any) -> Outcome:
    return replace(ran(100.0), profile=replace(weightless(15), **changes))


def test_the_search_follows_the_users_own_at_once_and_knows_it() -> None:
    curve = TrainingCurve(facts=StepFacts(1, 3, (11,)))
    tuner, [own, searched] = played(plan_of(), replace(profiled_by_own(), training=curve))
    assert own.kind is TrialKind.BASELINE and own.profiles and own.batch == plan_of().own_batch
    assert searched.kind is TrialKind.SEARCH and not searched.profiles
    assert searched.own_steps == StepFacts(1, 3)
    assert tuner.run.baseline is own and tuner.run.best is own and tuner.run.profile is not None


@pytest.mark.parametrize("kind", ["OOM", "HOST_OOM", "TIMEOUT", "DIVERGED", "ERROR"])
def test_the_model_is_profiled_at_the_smallest_micro_batch_if_it_fails(kind: str) -> None:
    tuner, [_, profile, searched] = played(
        plan_of(), failed(kind, "it did not train"), profiled(weightless(15))
    )
    assert profile.kind is TrialKind.PROFILE
    assert (profile.stage, profile.batch.micro_batch) == (0, 1)
    assert searched.kind is TrialKind.SEARCH and not tuner.decisions.failure


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
def test_a_failure_where_nothing_else_is_to_be_tried_ends_the_run(kind: str, said: str) -> None:
    """It has the smallest micro batch, in the only stage."""
    plan = plan_of(own_batch=ONE_SAMPLE, zero_stages=(0,))
    tuner, trials = played(plan, replace(failed(kind, "it broke"), profile=weightless(15)))
    assert tuner.decisions.failure and tuner.finished and len(trials) == 1
    tuner.stop()
    assert tuner.run.stop_reason == f"your own configuration {said}: it broke"


@pytest.mark.parametrize(
    "outcome",
    [
        replace(failed("ERROR", "NameError"), before_engine=True),
        failed("INVALID", "the script never calls deepspeed.initialize"),
    ],
)
def test_a_failure_of_any_configuration_ends_the_run(outcome: Outcome) -> None:
    tuner, trials = played(plan_of(), outcome)
    assert len(trials) == 1 and tuner.decisions.failure
    assert "your own configuration" in str(tuner.decisions.stop_reason)


def test_errors_with_both_micro_batches_end_the_run() -> None:
    tuner, trials = played(plan_of(), failed("ERROR", "one"), failed("ERROR", "another"))
    assert [trial.batch.micro_batch for trial in trials] == [4, 1]
    assert tuner.decisions.stop_reason == "the profile trial failed: another"


def _climbing(**changes: Any) -> Plan:
    """Slots with memory of their own, on which the user trains in stage 1."""
    base = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"}}
    own = BatchTriple(2, 1, 1)
    fixed = {"base_config": base, "offload_helps": True, "slots_per_trial": 2, "own_batch": own}
    return plan_of(**{**fixed, **changes})


def test_a_model_that_does_not_fit_climbs_the_ladder() -> None:
    plan = _climbing(max_trials=30, own_batch=BatchTriple(8, 4, 1))
    out_of_memory = [failed("OOM")] * 4
    # An operator may not compile: that is no reason to stop.
    tuner, trials = played(plan, *out_of_memory, failed("ERROR"))
    climbed = [(trial.strategy, trial.batch.micro_batch) for trial in trials]
    steps = [("z1", 4), ("z1", 1), ("z2", 1), ("z2_offload", 1), ("z3_offload", 1)]
    assert climbed == [*steps, ("z3_offload", 4)]
    last = trials[-1]
    zero = {"stage": 3, GATHER: True, "offload_optimizer": {"device": "cpu"}}
    assert last.overrides["zero_optimization"] == {**zero, "reduce_bucket_size": 10**6}
    tuner.record(last.id, profiled(weightless(15)))
    drive(tuner, World(), slots=2)
    searched = {t.strategy for t in tuner.run.trials.values() if t.kind is TrialKind.SEARCH}
    assert searched == {"z3_offload", "z3_offload_param"}
    assert tuner.run.best is not None


def test_the_top_of_the_ladder_ends_the_run() -> None:
    tuner, trials = played(_climbing(), *[failed("OOM", "too large")] * 6)
    assert [trial.strategy for trial in trials] == [
        *("z1", "z1", "z2", "z2_offload", "z3_offload", "z3_offload_param")
    ]
    assert tuner.decisions.stop_reason == "the profile trial ran out of memory: too large"


def test_a_timeout_is_no_reason_to_climb() -> None:
    tuner, trials = played(_climbing(), failed("TIMEOUT"), failed("TIMEOUT"))
    assert tuner.decisions.failure and {trial.stage for trial in trials} == {1}


def test_a_scripts_own_optimizer_may_be_offloaded() -> None:
    _, trials = played(
        _climbing(base_config={"zero_optimization": {"stage": 2}}), *[failed("OOM")] * 2
    )
    assert trials[-1].overrides["zero_force_ds_cpu_optimizer"] is False
    assert trials[-1].overrides["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


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
    assert tuner.run.trials[0].script_args == {"gradient_checkpointing": False}
    # The same configuration with checkpointing is another one.
    assert [t.script_args["gradient_checkpointing"] for t in trials] == [False, True]
    assert trials[1].batch == tuner.run.trials[0].batch != trials[0].batch
    assert "gradient_checkpointing" not in json.dumps(trials[1].overrides)


def test_a_model_without_a_profile_ends_the_run() -> None:
    tuner, _ = played(plan_of(), ran(), ran())
    assert tuner.decisions.failure


@pytest.mark.parametrize(
    ("metric", "flops", "fails"),
    [("FLOPS_per_gpu", 0.0, True), ("FLOPS_per_gpu", 1.0, False), ("throughput", 0.0, False)],
)
def test_a_model_whose_flops_were_not_counted(metric: str, flops: float, fails: bool) -> None:
    tuner, _ = tuner_of(plan_of(metric=metric))
    tuner.next_trials(1)
    tuner.record(0, profiled_by_own(flops_per_sample=flops))
    assert bool(tuner.decisions.failure) == fails
    assert ("--metric throughput" in (tuner.decisions.stop_reason or "")) == fails


@pytest.mark.parametrize("tokens", [None, 1e5])
def test_a_script_whose_tokens_were_not_counted(tokens: float | None) -> None:
    own = profiled_by_own()
    assert own.metrics is not None
    measured = replace(own.metrics, tokens_per_second=tokens)
    tuner, _ = tuner_of(plan_of(metric="tokens_per_second"))
    tuner.next_trials(1)
    tuner.record(0, replace(own, metrics=measured))
    assert ("no tokens could be counted" in (tuner.decisions.stop_reason or "")) == (tokens is None)


@pytest.mark.parametrize("hope", [None, failed("OOM"), failed("TIMEOUT")])
def test_a_run_in_which_everything_fails_ends_early(hope: Outcome | None) -> None:
    error = failed("ERROR", "a bug in the fourth step")
    tuner, [*_, first] = played(plan_of(max_trials=12), error, profiled(weightless(15)))
    tuner.record(first.id, hope or error)
    while trials := tuner.next_trials(1):
        tuner.record(trials[0].id, error)
    others = len(tuner.run.trials) - 1  # but the profile
    assert others == HOPELESS_AFTER if hope is None else others > HOPELESS_AFTER
    said = "every trial failed, and none ran out of memory"
    assert (tuner.decisions.stop_reason == said) is (hope is None)


def test_a_search_in_which_nothing_ran_found_nothing_out() -> None:
    tuner, _ = begun(plan_of(max_trials=12))
    assert "nothing else was measured yet" in verdict(tuner.run).headline
    while trials := tuner.next_trials(1):
        tuner.record(trials[0].id, failed("ERROR", "the output folder exists"))
    shown = verdict(tuner.run)
    assert "nothing else ran" in shown.headline
    assert any("the output folder exists" in text for text in shown.warnings)


def test_too_large_a_micro_batch_for_the_data_shrinks() -> None:
    tuner, _ = begun(plan_of(max_trials=30, zero_stages=(1,), own_batch=ONE_SAMPLE))
    short = replace(failed("INVALID", "the script ended"), smaller_may_run=True)
    while trials := tuner.next_trials(1):
        fits = trials[0].batch.micro_batch <= 3
        tuner.record(trials[0].id, ran(trials[0].batch.micro_batch) if fits else short)
    assert tuner.run.best is not None and tuner.run.best.batch.micro_batch == 3


@pytest.mark.parametrize(
    ("second", "ends"),
    [(failed("ERROR", "the same"), True), (profiled(weightless(15)), False)],
    ids=["the script's own error", "what only stage 0 forbids"],
)
def test_what_deepspeed_refuses_at_stage_0_is_tried_with_the_other_stages(
    second: Outcome, ends: bool
) -> None:
    frames = '  File "train.py", line 3\n  File "/x/deepspeed/runtime/engine.py", line 9\n'
    plan = plan_of(zero_stages=(0, 1, 2, 3), own_batch=ONE_SAMPLE)
    tuner, trials = played(plan, replace(failed("ERROR", "the same"), detail=frames), second)
    assert (trials[1].kind, trials[1].stage) == (TrialKind.PROFILE, 1)
    stages = {trial.stage for trial in [*trials[2:], *tuner.next_trials(3)]}
    assert (tuner.decisions.failure is not None) is ends
    assert bool(stages) is not ends and 0 not in stages
