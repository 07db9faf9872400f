from __future__ import annotations

from dataclasses import replace

from dsat.engines import Engine
from dsat.values.outcome import Outcome
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.engine_contract import Behaviour, EngineContract
from testing.helpers import failed, ran
from testing.simulated import SimulatedEngine


def _behave(trial: Trial) -> Outcome:
    if trial.overrides["behaviour"] == Behaviour.HANGS:
        return replace(ran(), duration_s=1e9)
    if trial.overrides["behaviour"] == Behaviour.EXHAUSTS_MEMORY:
        return replace(failed("OOM", "out of memory"), duration_s=5.0)
    if trial.overrides["behaviour"] == Behaviour.CRASHES:
        return replace(failed("ERROR", "crashed"), duration_s=5.0)
    return replace(ran(), duration_s=30.0)


class TestSimulatedEngine(EngineContract):
    def make(self, num_slots: int) -> Engine:
        return SimulatedEngine(_behave, num_slots=num_slots)


class TestSimulatedEngineWithSeveralSlots(EngineContract):
    slots_per_trial = 3

    def make(self, num_slots: int) -> Engine:
        return SimulatedEngine(_behave, num_slots=num_slots, slots_per_trial=3)


def test_trials_end_in_the_order_of_their_virtual_ends() -> None:
    batch = BatchTriple(1, 1, 1)
    trials = {n: Trial(n, TrialKind.SEARCH, f"t{n}", 1, batch, {}) for n in (1, 2, 3)}
    lasting_s = {1: 30.0, 2: 10.0, 3: 20.0}
    engine = SimulatedEngine(
        lambda trial: replace(ran(), duration_s=lasting_s[trial.id]), num_slots=3
    )
    for trial in trials.values():
        engine.launch(trial)
    assert engine.poll(4) == [] and engine.now_s == 4
    ends = [(trial_id, engine.now_s) for _ in trials for trial_id, _ in engine.poll(100)]
    assert [trial_id for trial_id, _ in ends] == [2, 3, 1]
    assert engine.now_s == 30
