"""The tuner: the order of trials, the budget, and what is kept of the user's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dsat.inputs import ds_config
from dsat.search import SEARCHES
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.tuner import Tuner
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import (
    FakeClock,
    World,
    drive,
    failed,
    plan_of,
    profiled,
    ran,
    weightless,
)
from testing.tuners import ONE_LINEAGE, begun, configs_of, events_of, tuner_of


def test_profile_first_then_the_users_own_batch_then_the_search() -> None:
    plan = plan_of(own_batch=BatchTriple(24, 6, 4))
    tuner, journal = tuner_of(plan)

    (profile,) = tuner.next_trials(8)
    assert (profile.id, profile.kind, profile.lineage) == (0, TrialKind.PROFILE, None)
    assert profile.batch == BatchTriple(1, 1, 1)
    assert profile.flops_per_sample is None
    assert tuner.next_trials(8) == [], "the profile decides what is searched"

    tuner.record(0, profiled(weightless(15)))
    baseline, first, *_ = tuner.next_trials(8)
    assert baseline.kind is TrialKind.BASELINE
    assert baseline.overrides == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 4,
    }, "their own configuration, with the batch sizes spelled out"
    assert first.kind is TrialKind.SEARCH
    assert (first.id, first.lineage) == (2, 0)
    assert first.batch == BatchTriple(8 * 4, 8, 4)
    assert first.overrides["zero_optimization"]["stage"] == first.stage
    assert first.flops_per_sample == 1e9
    assert [event["event"] for event in journal.events[:4]] == [
        "start",
        "proposed",
        "finished",
        "proposed",
    ]


@pytest.mark.parametrize(("metric", "known"), [("throughput", True), ("forward", False)])
def test_trials_know_what_there_is_to_beat(metric: str, known: bool) -> None:
    tuner, _ = begun(plan_of(metric=metric))
    beaten = []
    for value in (5.0, 9.0, 7.0, 1.0):
        (trial,) = tuner.next_trials(1)
        beaten.append(dict(trial.to_beat))
        tuner.record(trial.id, ran(value, metric))
    best = [{}, {metric: 5.0}, {metric: 9.0}, {metric: 9.0}]
    assert beaten == (best if known else [{}] * 4)


def test_profile_keeps_to_divisible_by() -> None:
    tuner, _ = tuner_of(plan_of(divisible_by=4, slots_per_trial=2))
    (profile,) = tuner.next_trials(2)
    assert profile.batch == BatchTriple(8, 4, 1)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (None, None),
        ({"stage": 0, "reduce_bucket_size": 5}, None),
        ({"stage": 1}, {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}),
        ({"stage": 2, "reduce_bucket_size": 5}, {"allgather_bucket_size": 10**6}),
        ({"stage": 3}, {"reduce_bucket_size": 10**6}),
        ({"stage": 3, "reduce_bucket_size": 5}, None),
    ],
)
def test_profile_has_small_buckets_unless_the_user_chose_them(
    zero: dict[str, Any] | None, expected: dict[str, Any] | None
) -> None:
    tuner, _ = tuner_of(plan_of(base_config={} if zero is None else {"zero_optimization": zero}))
    (profile,) = tuner.next_trials(1)
    assert profile.overrides.get("zero_optimization") == expected


def test_buckets_larger_than_the_profiled_model_are_not_searched() -> None:
    plan = plan_of(zero_stages=(1,))
    tuner, _ = begun(plan, ceiling=1)  # of a model without parameters
    trials = tuner.next_trials(9)
    assert [trial.overrides.get("zero_optimization") for trial in trials] == [
        None,
        {"stage": 1, "reduce_bucket_size": 10**6, "contiguous_gradients": True},
        {"stage": 1, "reduce_bucket_size": 10**6, "contiguous_gradients": False},
    ]


def test_journal_holds_a_decision_before_it_is_returned_and_an_outcome_before_it_is_used() -> None:
    class Spy(MemoryJournal):
        def append(self, event: Mapping[str, Any]) -> None:
            if event["event"] == "proposed":
                assert event["trial"]["id"] not in tuner.run.trials
            if event["event"] == "finished":
                assert event["trial_id"] not in tuner.run.outcomes
                assert not tuner.decisions.search_began, "the outcome builds the search"
            super().append(event)

    journal = Spy([])
    tuner = Tuner(plan_of(), journal, info={"name": "demo"}, clock=FakeClock())
    assert journal.events[0]["info"] == {"name": "demo"}
    (trial,) = tuner.next_trials(1)
    assert Trial.from_json(journal.events[-1]["trial"]) == trial
    tuner.record(0, profiled(weightless(15)))
    assert journal.events[-1]["outcome"]["profile"]["slot_memory_bytes"] == 150


@pytest.mark.parametrize("max_trials", [1, 2, 3, 9])
def test_the_budget_counts_every_trial(max_trials: int) -> None:
    tuner, journal = tuner_of(plan_of(max_trials=max_trials))
    drive(tuner, World(), slots=4)
    assert len(tuner.run.trials) == max_trials
    assert tuner.decisions.stop_reason == f"the budget of {max_trials} trials is used"
    assert tuner.finished and not tuner.decisions.failure
    assert journal.events[-1]["event"] == "stopped"
    assert journal.events[-1]["reason"] == tuner.decisions.stop_reason


def test_the_run_goes_on_while_the_last_trials_run() -> None:
    tuner, _ = begun(plan_of(max_trials=3))
    assert [trial.id for trial in tuner.next_trials(5)] == [1, 2]
    assert tuner.decisions.stop_reason is not None and not tuner.finished
    tuner.record(2, ran())
    assert not tuner.finished
    tuner.record(1, ran())
    assert tuner.finished


@pytest.mark.parametrize(
    ("slots_per_trial", "free_slots", "started"),
    [(1, 0, 0), (1, 1, 1), (1, 3, 3), (2, 1, 0), (2, 2, 1), (2, 5, 2), (4, 8, 2)],
)
def test_trials_fill_the_free_slots(slots_per_trial: int, free_slots: int, started: int) -> None:
    tuner, _ = begun(
        plan_of(slots_per_trial=slots_per_trial, own_batch=BatchTriple(4, 4, 1)), ceiling=15
    )
    assert len(tuner.next_trials(free_slots)) == started


def test_an_exhausted_search_ends_the_run_when_nothing_runs() -> None:
    tuner, journal = begun(plan_of(**ONE_LINEAGE, own_batch=BatchTriple(3, 3, 1)), ceiling=1)
    assert [trial.kind for trial in tuner.next_trials(3)] == [TrialKind.BASELINE, TrialKind.SEARCH]
    assert tuner.decisions.stop_reason is None
    tuner.record(2, failed("OOM"))
    assert tuner.next_trials(3) == []
    assert tuner.decisions.stop_reason is None, "the baseline may still change something"
    tuner.record(1, ran())
    assert tuner.decisions.stop_reason is None, "the search was not asked since"
    assert tuner.next_trials(3) == []
    assert tuner.decisions.stop_reason == "every configuration was tried"
    assert [event["event"] for event in journal.events].count("waiting") == 3


def test_a_search_that_waits_is_not_asked_again_before_something_ended() -> None:
    tuner, journal = begun(plan_of(**ONE_LINEAGE, own_batch=BatchTriple(3, 3, 1)))
    assert len(tuner.next_trials(3)) == 2
    for _ in range(3):
        assert tuner.next_trials(3) == []
    assert [event["event"] for event in journal.events].count("waiting") == 1


def test_a_search_that_gives_up_ends_the_run() -> None:
    plan = plan_of("random", search_options={"early_stopping": 2}, max_trials=99)
    tuner, _ = begun(plan)
    value = 10.0
    while (trials := tuner.next_trials(1)) and len(tuner.run.trials) < 50:
        tuner.record(trials[0].id, ran(value := value - 0.1))
    assert [trial.kind for trial in tuner.run.trials.values()].count(TrialKind.SEARCH) == 2
    assert tuner.decisions.stop_reason == "no better configuration in the last 2 trials"


def test_a_second_outcome_of_a_trial_is_ignored() -> None:
    tuner, journal = begun(plan_of())
    (baseline,) = tuner.next_trials(1)
    tuner.record(baseline.id, ran(5.0))
    before = list(journal.events)
    tuner.record(baseline.id, failed("ERROR"))
    tuner.record(0, failed("ERROR"))
    assert journal.events == before
    assert tuner.run.value(baseline) == 5.0
    assert tuner.next_trials(1) != []


def test_stopping_twice_says_it_once() -> None:
    plan = plan_of(max_trials=4)
    events = events_of(plan, World(), slots=1)
    tuner, journal = tuner_of(plan, events)
    tuner.stop()
    assert journal.events == events


@pytest.mark.parametrize("method", ["asha", "binary", "random"])  # they begin in the middle
def test_the_plan_reaches_the_search(method: str) -> None:
    def first(**changes: Any) -> Trial:
        tuner, _ = begun(plan_of(method, zero_stages=(2,), **changes))
        return tuner.next_trials(2)[1]

    assert first().stage == 2
    beyond = first(search_options={"search_range_factor": 2.0})
    assert beyond.batch.micro_batch > first().batch.micro_batch


@pytest.mark.parametrize("method", SEARCHES)
def test_the_seed_decides_the_trials(method: str) -> None:
    def configs(seed: int) -> list[str]:
        tuner, _ = tuner_of(plan_of(method, seed=seed))
        drive(tuner, World(), slots=2)
        return configs_of(tuner.run)

    assert configs(1) == configs(1)
    assert (configs(1) != configs(2)) == (method not in ("gridsearch", "model"))


def test_what_the_user_set_by_hand_is_not_searched() -> None:
    config = {"zero_optimization": {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 77}}
    plan = plan_of(base_config=config, zero_stages=(2,), slots_per_trial=2)
    tuner, _ = begun(plan)
    for trial in tuner.next_trials(20):
        section = ds_config.merge(config, trial.overrides)["zero_optimization"]
        assert (section["overlap_comm"], section["reduce_bucket_size"]) == (False, 77)
        if trial.kind is TrialKind.SEARCH:
            assert set(trial.overrides["zero_optimization"]) == {
                "stage",
                "allgather_bucket_size",
                "reduce_scatter",
                "contiguous_gradients",
            }


def test_an_exact_batch_size_is_kept_by_every_trial_of_the_search() -> None:
    plan = plan_of(
        train_batch_size=48, divisible_by=3, slots_per_trial=2, own_batch=BatchTriple(48, 6, 4)
    )
    tuner, _ = tuner_of(plan)
    drive(tuner, World(), slots=6)
    searched = [t for t in tuner.run.trials.values() if t.kind is TrialKind.SEARCH]
    assert {trial.batch.micro_batch for trial in searched} <= {3, 6, 12, 24}
    assert len({trial.batch.micro_batch for trial in searched}) > 1
    for trial in searched:
        assert trial.batch.train_batch_size == 48
        assert trial.batch.micro_batch * trial.batch.gas * 2 == 48
