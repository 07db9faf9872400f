from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dsat.engines import Engine
from dsat.errors import EngineError
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


def _lasting(duration_s: float, trial_id: int) -> Trial:
    batch = BatchTriple(1, 1, 1)
    return Trial(trial_id, TrialKind.SEARCH, f"t{trial_id}", 1, batch, {"duration_s": duration_s})


def _engine(num_slots: int = 3, slots_per_trial: int = 1) -> SimulatedEngine:
    return SimulatedEngine(
        lambda trial: replace(ran(trial.id), duration_s=trial.overrides["duration_s"]),
        num_slots=num_slots,
        slots_per_trial=slots_per_trial,
    )


def test_trials_end_in_the_order_of_their_virtual_ends() -> None:
    engine = _engine()
    engine.launch(_lasting(30, 1))
    engine.launch(_lasting(10, 2))
    engine.launch(_lasting(20, 3))
    ends: list[tuple[float, int]] = []
    while len(ends) < 4:
        for trial_id, _ in engine.poll(100):
            ends.append((engine.now_s, trial_id))
            if trial_id == 2:
                engine.launch(_lasting(15, 4))
    assert ends == [(10, 2), (20, 3), (25, 4), (30, 1)]


def test_trials_that_end_at_once_are_told_together_in_the_order_of_their_ids() -> None:
    engine = _engine()
    for trial_id in (2, 1, 3):
        engine.launch(_lasting(10, trial_id))
    assert [trial_id for trial_id, _ in engine.poll(10)] == [1, 2, 3]


def test_the_clock_goes_no_further_than_the_poll() -> None:
    engine = _engine()
    engine.launch(_lasting(10, 1))
    assert engine.poll(4) == []
    assert engine.now_s == 4
    engine.launch(_lasting(3, 2))
    assert [trial_id for trial_id, _ in engine.poll(6)] == [2]
    assert engine.now_s == 7
    assert [trial_id for trial_id, _ in engine.poll(6)] == [1]
    assert engine.now_s == 10


def test_it_counts_slots_and_slot_seconds() -> None:
    engine = _engine(num_slots=5, slots_per_trial=2)
    engine.launch(_lasting(10, 1))
    engine.launch(_lasting(20, 2))
    with pytest.raises(EngineError, match="trial 3"):
        engine.launch(_lasting(1, 3))
    engine.poll(100)
    engine.poll(100)
    assert engine.busy_slot_s == 2 * 10 + 2 * 20


@pytest.mark.parametrize("method", SEARCHES)
def test_a_whole_run_repeats_itself(method: str) -> None:
    def journal() -> str:
        plan = plan_of(method, max_trials=30)
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
        assert len(tuner.run.trials) == 30
        assert tuner.run.best is not None
        return json.dumps(events.events)

    assert journal() == journal()
