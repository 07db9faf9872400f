"""The engine over searcher events, as every engine and by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dsat.determined_cluster.engine import CLOSE, CREATE, VALIDATE, ClusterEngine
from dsat.engines import Engine
from dsat.inputs import ds_config
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.cluster import FakeMaster, engine_of, job_of, metric_of
from testing.engine_contract import Behaviour, EngineContract
from testing.helpers import plan_of, ran


class PumpedEngine(ClusterEngine):
    """The engine with a master that answers at once; asking it for news lets time pass there."""

    def __init__(self, master: FakeMaster, num_slots: int, slots_per_trial: int = 1) -> None:
        plan = plan_of(slots_per_trial=slots_per_trial)
        super().__init__(job_of(plan, num_slots=num_slots), 1, master)
        self._master = master
        self._behaviours: dict[int, str] = {}

    def launch(self, trial: Trial) -> None:
        super().launch(trial)
        self._behaviours[trial.id] = trial.overrides["behaviour"]

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        self._master.apply(self.take_operations())
        for request_id, trial_id in list(self._master.active.items()):
            behaviour = self._behaviours[trial_id]
            if behaviour == Behaviour.RUNS:
                self._master.report(request_id, metric_of(ran()))
            elif behaviour == Behaviour.EXHAUSTS_MEMORY:
                self._master.fail(request_id, "torch.OutOfMemoryError: CUDA out of memory.")
            elif behaviour == Behaviour.CRASHES:
                self._master.fail(request_id, "ValueError: no")
        for event in self._master.events:
            if event.kind == "validated":
                self.validated(event.request_id, event.metric)
            elif event.kind in ("failed", "canceled"):
                self.exited(event.request_id, canceled=event.kind == "canceled")
            elif event.kind == "closed":
                self.closed(event.request_id)
        self._master.events.clear()
        return super().poll(timeout_s)


class TestClusterEngine(EngineContract):
    def make(self, num_slots: int) -> Engine:
        return PumpedEngine(FakeMaster(), num_slots)


class TestClusterEngineWithSeveralSlots(EngineContract):
    slots_per_trial = 3

    def make(self, num_slots: int) -> Engine:
        return PumpedEngine(FakeMaster(), num_slots, 3)


def trial(number: int = 0, kind: TrialKind = TrialKind.SEARCH) -> Trial:
    overrides = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    return Trial(number, kind, f"t{number}", 2, BatchTriple(8, 4, 2), overrides)


def test_request_ids_are_those_of_the_search_and_the_trial() -> None:
    first, again = engine_of(FakeMaster()), engine_of(FakeMaster())
    ids = [first.request_id(number) for number in range(3)]
    assert ids == [again.request_id(number) for number in range(3)]
    assert len(set(ids)) == 3
    assert engine_of(FakeMaster(), plan_of(seed=8)).request_id(0) not in ids


def test_a_trial_is_created_with_its_whole_configuration() -> None:
    engine = engine_of(FakeMaster())
    engine.launch(trial(3))
    created, validated = engine.take_operations()
    assert engine.take_operations() == []
    request_id = engine.request_id(3)
    assert created[CREATE]["requestId"] == request_id
    assert validated[VALIDATE]["validateAfter"]["requestId"] == request_id
    hparams = json.loads(created[CREATE]["hyperparams"])
    assert hparams["deepspeed_config"] == "ds.json"
    assert hparams[ds_config.OVERWRITE_KEY] == trial().overrides
    assert hparams[ds_config.DSAT_MODE_KEY] is True
    assert hparams[ds_config.DSAT_TRIAL_KEY]["id"] == 3


def test_a_trial_that_reports_is_closed_and_its_end_is_no_news() -> None:
    master = FakeMaster()
    engine = engine_of(master)
    engine.launch(trial(1))
    engine.take_operations()
    request_id = engine.request_id(1)
    engine.validated(request_id, metric_of(ran(5.0)))
    assert engine.take_operations() == [{CLOSE: {"requestId": request_id}}]
    [(number, outcome)] = engine.poll(0)
    assert (number, outcome.kind, outcome.metrics) == (1, OutcomeKind.OK, ran(5.0).metrics)
    engine.exited(request_id, canceled=False)  # it failed at its exit
    engine.closed(request_id)
    assert engine.poll(0) == [] and engine.take_operations() == []


def test_trials_on_another_kind_of_device_are_not_compared() -> None:
    """Whichever process of the runner took the first one's outcome, and however the other ended."""
    a100, v100 = (replace(ran(5.0), device_name=name, duration_s=1.0) for name in ("A100", "V100"))
    first, second = trial(0), trial(1)
    engine = engine_of(FakeMaster())
    engine.adopt(trial(9), replace(a100, kind=OutcomeKind.INVALID, device_name=""))
    for same in (first, second):
        engine.launch(same)
        engine.validated(engine.request_id(same.id), metric_of(a100))
    assert engine.poll(0) == [(0, a100), (1, a100)]
    later = engine_of(FakeMaster())
    later.adopt(first, a100)
    for number, outcome in enumerate((v100, replace(v100, kind=OutcomeKind.OOM)), start=1):
        later.launch(trial(number))
        later.validated(later.request_id(number), metric_of(outcome))
        [(_, found)] = later.poll(0)
        assert found.kind is OutcomeKind.INVALID and found.metrics is None
        assert "V100" in found.message and "A100" in found.message
        assert "resources.resource_pool" in found.message


@pytest.mark.parametrize("metric", [0.0, 1.5, "NaN", {"loss": 2.0}, [], {}])
def test_a_metric_of_the_scripts_own_is_no_measurement(metric: Any) -> None:
    engine = engine_of(FakeMaster())
    engine.launch(trial(1))
    engine.validated(engine.request_id(1), metric)
    [(_, outcome)] = engine.poll(0)
    assert outcome.kind is OutcomeKind.INVALID
    assert "its own searcher metric" in outcome.message


def test_how_long_a_trial_took_is_what_it_says_or_the_time_since_its_launch() -> None:
    times = [0.0]
    engine = ClusterEngine(job_of(plan_of(), num_slots=3), 1, FakeMaster(), lambda: times[0])
    for number in (1, 2):
        engine.launch(trial(number))
    times[0] = 100.0
    engine.validated(engine.request_id(1), metric_of(replace(ran(), duration_s=4.0)))
    engine.exited(engine.request_id(2), canceled=True)
    assert [outcome.duration_s for _, outcome in engine.poll(0)] == [4.0, 100.0]
