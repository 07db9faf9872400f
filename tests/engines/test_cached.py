"""Trials whose outcomes are known from earlier runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsat.engines import Engine
from dsat.engines.cached import CachedEngine, key
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial, TrialKind
from testing.engine_contract import Behaviour, EngineContract
from testing.helpers import failed, plan_of, ran, weightless
from testing.scripted_hosts import trial_of
from testing.simulated import SimulatedEngine

PLAN = plan_of("random")
KNOWN, NEW = replace(ran(7.0), duration_s=3.0), replace(ran(5.0), duration_s=3.0)


def behave(trial: Trial) -> Outcome:
    """What becomes of a trial of the contract."""
    return {
        Behaviour.RUNS: NEW,
        Behaviour.EXHAUSTS_MEMORY: replace(failed("OOM", "out of memory"), duration_s=5.0),
        Behaviour.CRASHES: replace(failed("ERROR", "crashed"), duration_s=5.0),
        Behaviour.HANGS: replace(NEW, duration_s=1e9),
    }[Behaviour(trial.overrides["behaviour"])]


class TestCachedEngine(EngineContract):
    """With nothing known it is the engine behind it."""

    def make(self, num_slots: int) -> Engine:
        return CachedEngine(SimulatedEngine(behave, num_slots=num_slots), {}, PLAN)


def outcome_of(trial: Trial, known: Trial, outcome: Outcome = KNOWN) -> Outcome:
    """The outcome of a trial where another is known."""
    simulated = SimulatedEngine(lambda trial: NEW, num_slots=1)
    engine = CachedEngine(simulated, {key(known, PLAN): outcome}, PLAN)
    engine.launch(trial)
    [(number, found)] = engine.poll(100)
    assert number == trial.id and engine.poll(0) == []
    return found


@pytest.mark.parametrize(
    ("changes", "is_known"),
    [
        ({"id": 7, "name": "another"}, True),
        ({"kind": TrialKind.FINAL}, False),  # it confirms the known one
        ({"kind": TrialKind.PROFILE}, False),
        ({"script_args": {"--seed": "3"}}, False),
        ({"overrides": {**trial_of(1).overrides, "zero_optimization": {"stage": 2}}}, False),
    ],
)
def test_only_a_trial_that_measures_the_same_is_known(
    changes: dict[str, object], is_known: bool
) -> None:
    known = trial_of(1)
    assert (outcome_of(replace(known, **changes), known) == KNOWN) is is_known  # type: ignore[arg-type]


def test_a_profile_is_known_only_with_the_models_counts() -> None:
    profile = replace(trial_of(1), kind=TrialKind.PROFILE)
    assert outcome_of(profile, profile) == NEW
    counted = replace(KNOWN, profile=weightless(1))
    assert outcome_of(profile, profile, counted) == counted
