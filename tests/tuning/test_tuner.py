"""The tuner: the order of trials, the budget, and what is kept of the user's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dsat.inputs import ds_config
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.tuner import Tuner
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import (
    FakeClock,
    World,
    drive,
    failed,
    plan_of,
    ran,
    weightless,
)
from testing.tuners import ONE_LINEAGE, begun, tuner_of


def test_the_search_keeps_the_users_accumulation_and_knows_the_profile() -> None:
    tuner, journal = begun(plan_of(own_batch=BatchTriple(24, 6, 4), slots_per_trial=1))
    assert tuner.run.trials[0].overrides == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 4,
    }, "their own configuration, with the batch sizes spelled out"
    assert tuner.next_trials(0) == []
    first, *others = tuner.next_trials(3)
    assert len(others) == 2, "as many as there are slots"
    assert (first.kind, first.id, first.lineage) == (TrialKind.SEARCH, 1, 0)
    assert first.batch == BatchTriple(8 * 4, 8, 4)
    assert first.overrides["zero_optimization"]["stage"] == first.stage
    assert first.flops_per_sample == 1e9
    kinds = [event["event"] for event in journal.events]
    assert kinds == ["start", "proposed", "finished", *["proposed"] * 3]


@pytest.mark.parametrize(("metric", "known"), [("throughput", True), ("forward", False)])
def test_trials_know_what_there_is_to_beat(metric: str, known: bool) -> None:
    tuner, _ = begun(plan_of(metric=metric), ran(5.0, metric))
    beaten = []
    for value in (9.0, 7.0, 1.0):
        (trial,) = tuner.next_trials(1)
        beaten.append(dict(trial.to_beat))
        tuner.record(trial.id, ran(value, metric))
    assert beaten == ([{metric: 5.0}, {metric: 9.0}, {metric: 9.0}] if known else [{}] * 3)


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
    base = {} if zero is None else {"zero_optimization": zero}
    tuner, _ = begun(plan_of(base_config=base, divisible_by=2), failed("OOM"))
    profile = tuner.run.trials[1]
    assert profile.overrides.get("zero_optimization") == expected
    assert profile.batch == BatchTriple(2, 2, 1)


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
    tuner.record(0, replace(ran(), profile=weightless(15)))
    assert journal.events[-1]["outcome"]["profile"]["slot_memory_bytes"] == 150


@pytest.mark.parametrize("max_trials", [2, 9])
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


def test_an_exhausted_search_ends_the_run_when_nothing_runs() -> None:
    tuner, journal = begun(
        plan_of(**ONE_LINEAGE, own_batch=BatchTriple(3, 3, 1)), failed("OOM"), ceiling=1
    )
    [trial] = tuner.next_trials(3)
    for _ in range(3):
        assert tuner.next_trials(3) == []
    assert [event["event"] for event in journal.events].count("waiting") == 1
    tuner.record(trial.id, failed("OOM"))
    assert tuner.decisions.stop_reason is None, "the search was not asked since"
    assert tuner.next_trials(3) == []
    assert tuner.decisions.stop_reason == "every configuration was tried"
    assert [event["event"] for event in journal.events].count("waiting") == 2


def test_a_search_that_gives_up_ends_the_run() -> None:
    plan = plan_of("random", search_options={"early_stopping": 2}, max_trials=99)
    tuner, _ = begun(plan, ran(10.0))
    value = 10.0
    while (trials := tuner.next_trials(1)) and len(tuner.run.trials) < 50:
        tuner.record(trials[0].id, ran(value := value - 0.1))
    assert [trial.kind for trial in tuner.run.trials.values()].count(TrialKind.SEARCH) == 2
    assert tuner.decisions.stop_reason == "no better configuration in the last 2 trials"


def test_a_second_outcome_of_a_trial_is_ignored() -> None:
    tuner, journal = begun(plan_of())
    before = list(journal.events)
    tuner.record(0, failed("ERROR"))
    assert journal.events == before
    assert tuner.run.outcomes[0].ok


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
