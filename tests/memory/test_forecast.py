"""Predicted memory in the tuner: what it waits for, launches, passes over and remembers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsat.inputs.settings import BY_FORMULA, BY_SIMULATION, NO_MEMORY_MODEL
from dsat.memory import PHASES, SIMULATED, closed_form
from dsat.memory.closed_form import ModelFacts
from dsat.memory.forecast import Forecast
from dsat.memory.predictor import Anchor, Basis, Variant
from dsat.search import SEARCHES
from dsat.space.plan import Plan
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import MemoryUse, ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import Trial, TrialKind
from testing.helpers import failed, first_profiled, plan_of, ran
from testing.tuners import tuner_of

MIB, GIB = 2**20, 2**30
PROFILE = ModelProfile(
    num_params=50 * MIB,
    trainable_params=50 * MIB,
    param_bytes=4,
    activation_bytes_per_sample=20 * MIB,
    flops_per_sample=1e12,
    slot_memory_bytes=3 * GIB,
)
FACTS = replace(ModelFacts.of_profile(PROFILE), backward_bytes_per_sample=30.0 * MIB)
BUCKET = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}


def memory_of(trial: Trial) -> dict[str, int]:
    """What is really used: the closed form, and 5 % of the activations on top."""
    size = trial.batch.micro_batch
    estimate = closed_form.estimate(FACTS, trial.overrides, slots=1, micro_batch=size)
    return {p: getattr(estimate, p) + round(1.5 * MIB * size) for p in PHASES}


def outcome_of(trial: Trial) -> Outcome:
    memory = MemoryUse(memory_of(trial))
    if trial.kind is TrialKind.PROFILE:
        return Outcome(OutcomeKind.OK, profile=PROFILE, memory=memory)
    if memory.peak > PROFILE.slot_memory_bytes:
        return failed("OOM")
    size = trial.batch.micro_batch
    return first_profiled(trial, replace(ran(size / (size + 9)), memory=memory), PROFILE)


def basis(tuner: Tuner) -> Basis:
    """What simulations would find: the truth but for the workspaces."""
    anchors = []
    for config in tuner.decisions.reference_configs():
        plain = closed_form.estimate(FACTS, config, slots=1, micro_batch=20)
        anchors.append(Anchor(config, 20, replace(plain, source=SIMULATED)))
    return Basis((Variant({}, FACTS, tuple(anchors)),))


def drive(tuner: Tuner) -> None:
    while not tuner.finished:
        if tuner.decisions.needs_memory_basis:
            assert tuner.next_trials(4) == []
            tuner.set_memory_basis(basis(tuner))
        tuner.next_trials(1 - len(tuner.run.running))
        for trial in tuner.run.running:
            tuner.record(trial.id, outcome_of(trial))
    tuner.stop()


def plan(method: str, memory_model: str, **more: Any) -> Plan:
    given = {"zero_stages": (0, 1, 2, 3), "max_trials": 16, "metric": "throughput", **more}
    return plan_of(method, memory_model=memory_model, slot_memory_bytes=3 * GIB, **given)


@pytest.mark.parametrize("method", SEARCHES)
def test_hardly_a_trial_is_lost(method: str) -> None:
    lost = {}
    for memory_model in (BY_SIMULATION, NO_MEMORY_MODEL):
        tuner, _ = tuner_of(plan(method, memory_model))
        drive(tuner)
        lost[memory_model] = [o.kind for o in tuner.run.outcomes.values()].count(OutcomeKind.OOM)
        assert len(tuner.run.outcomes) > 4
    assert lost[BY_SIMULATION] <= 1
    assert lost[NO_MEMORY_MODEL] > lost[BY_SIMULATION]


@pytest.mark.parametrize("method", SEARCHES)
def test_the_largest_that_fits_is_found(method: str) -> None:
    tuner, _ = tuner_of(plan(method, BY_SIMULATION, max_trials=40, **_only(1)))
    drive(tuner)
    assert tuner.run.best is not None
    full = 3 * GIB
    assert 0.93 * full < max(memory_of(tuner.run.best).values()) <= full


@pytest.mark.parametrize("method", SEARCHES)
def test_a_run_cut_off_anywhere_continues_the_same(method: str) -> None:
    wanted = plan(method, BY_SIMULATION, max_trials=12)
    tuner, journal = tuner_of(wanted)
    drive(tuner)
    whole = journal.events
    assert sum(event["event"] == "foreseen" for event in whole) == 1
    for count in np.random.default_rng(len(whole)).choice(len(whole) + 1, 2, replace=False):
        tuner, journal = tuner_of(wanted, whole[:count])
        drive(tuner)
        assert journal.events == whole


def test_a_run_on_many_slots_continues_on_one() -> None:
    """Several trials end then with no decision between, and what follows is decided the same."""
    wanted = plan("model", BY_SIMULATION, max_trials=14)
    tuner, journal = tuner_of(wanted)
    while not tuner.finished and len(tuner.run.trials) < 8:
        if tuner.decisions.needs_memory_basis:
            tuner.set_memory_basis(basis(tuner))
        tuner.next_trials(4 - len(tuner.run.running))
        trial = tuner.run.running[0]
        tuner.record(trial.id, outcome_of(trial))
    tuner, journal = tuner_of(wanted, journal.events)
    while not tuner.finished:
        for trial in tuner.run.running or tuner.next_trials(1):
            tuner.record(trial.id, outcome_of(trial))
    tuner.stop()
    again, _ = tuner_of(wanted, journal.events)
    assert again.finished and again.run.outcomes.keys() == tuner.run.outcomes.keys()


def forecast_of(plan: Plan) -> Forecast:
    """What is predicted after the profile trial."""
    tuner, _ = tuner_of(plan)
    tuner.next_trials(1)
    tuner.record(0, outcome_of(tuner.run.trials[0]))
    assert tuner.decisions.forecast is not None and not tuner.decisions.needs_memory_basis
    return tuner.decisions.forecast


def test_the_largest_may_accumulate_nothing_where_smaller_ones_must() -> None:
    """In stage 1 whole gradients are held from one micro step to the next."""
    forecast = forecast_of(plan("model", BY_FORMULA, zero_stages=(1,), train_batch_size=128))
    model = forecast.model
    found = {}
    for gas in (1, 2):
        config = {"gradient_accumulation_steps": gas, "zero_optimization": {"stage": 1, **BUCKET}}
        found[gas] = model.largest(model.shape(config, {}))
    assert found[2] < found[1] < 128, "so the largest divisor of 128 that fits accumulates"
    assert forecast.largest({"stage": 1, **BUCKET}) == pytest.approx(found[2])
    for size, expected in ((200, found[1]), (240, found[2])):
        limited = replace(plan("model", BY_FORMULA, zero_stages=(1,)), max_train_batch_size=size)
        assert forecast_of(limited).largest({"stage": 1, **BUCKET}) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", ["random", "model"])
def test_what_took_no_trial_does_not_count_for_early_stopping(method: str, seed: int) -> None:
    options = {"early_stopping": 4}
    wanted = plan(method, BY_SIMULATION, seed=seed, max_trials=60, search_options=options)
    tuner, _ = tuner_of(wanted)
    drive(tuner)
    run = tuner.run
    assert run.stop_reason == "no better configuration in the last 4 trials"
    assert run.best is not None and list(run.outcomes)[-5] == run.best.id


def test_trials_say_what_was_predicted_for_them() -> None:
    tuner, _ = tuner_of(plan("binary", BY_SIMULATION))
    drive(tuner)
    profile, *others = tuner.run.trials.values()
    assert profile.predicted_bytes is None
    for trial in others:
        used = max(memory_of(trial).values())
        assert trial.predicted_bytes == pytest.approx(used, rel=0.03), trial.name


def test_the_formula_needs_no_simulation_and_learns_what_the_profile_does_not_show() -> None:
    """Here a third of what the backward pass needs."""
    tuner, _ = tuner_of(plan("binary", BY_FORMULA))
    drive(tuner)
    last = list(tuner.run.trials.values())[-1]
    assert last.predicted_bytes == pytest.approx(max(memory_of(last).values()), rel=0.1)


def test_a_prediction_that_nothing_fits_is_not_believed() -> None:
    """The profile trial ran, on a machine that does not tell what it used."""
    tuner, _ = tuner_of(plan("binary", BY_SIMULATION))
    tuner.next_trials(1)
    tuner.record(0, replace(outcome_of(tuner.run.trials[0]), memory=None))
    huge = replace(FACTS, backward_bytes_per_sample=9.0 * GIB)
    tuner.set_memory_basis(Basis((Variant({}, huge),)))
    assert tuner.decisions.forecast is None
    assert tuner.next_trials(1) != []


def _only(stage: int) -> dict[str, Any]:
    """One stage, whose settings are all fixed."""
    zero = {"stage": stage, "contiguous_gradients": True, **BUCKET}
    return {"zero_stages": (stage,), "base_config": {"zero_optimization": zero}}
