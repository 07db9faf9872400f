from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dsat.engines import Engine
from dsat.search import SEARCHES
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Outcome
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.engine_contract import Behaviour, EngineContract
from testing.helpers import FakeClock, World, failed, plan_of, ran
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
    assert engine.now_s == 30 and engine.busy_slot_s == 60


@pytest.mark.parametrize("method", SEARCHES)
def test_a_whole_run_repeats_itself(method: str) -> None:
    def journal() -> str:
        plan = plan_of(method, max_trials=15)
        events = MemoryJournal([])
        tuner = Tuner(plan, events, clock=FakeClock())
        world = World()
        engine = SimulatedEngine(
            lambda trial: replace(world.outcome(trial), duration_s=60 / trial.batch.micro_batch),
            num_slots=4,
        )
        while not tuner.finished:
            for trial in tuner.next_trials(engine.num_slots - len(tuner.run.running)):
                engine.launch(trial)
            for trial_id, outcome in engine.poll(1000):
                tuner.record(trial_id, outcome)
        assert len(tuner.run.trials) == 15
        assert tuner.run.best is not None
        return json.dumps(events.events)

    assert journal() == journal()
