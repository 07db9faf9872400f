from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dsat.errors import JournalMismatch
from dsat.inputs import ds_config
from dsat.search import SEARCHES
from dsat.space.plan import Plan
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.run import HOPELESS_AFTER, Run
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import (
    Event,
    FakeClock,
    World,
    drive,
    failed,
    plan_of,
    profiled,
    ran,
    weightless,
)

# Nothing but the micro batch is left to search: one lineage, whose ZeRO section is the user's own.
ONE_LINEAGE: Mapping[str, Any] = {
    "zero_stages": (1,),
    "base_config": {
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": 1000,
            "contiguous_gradients": True,
        }
    },
}


def _tuner(plan: Plan, events: list[Event] | None = None) -> tuple[Tuner, MemoryJournal]:
    journal = MemoryJournal(list(events or []))
    return Tuner(plan, journal, events=events, clock=FakeClock()), journal


def _begun(plan: Plan, *, ceiling: int = 15) -> tuple[Tuner, MemoryJournal]:
    """A tuner whose profile trial ended well."""
    tuner, journal = _tuner(plan)
    tuner.next_trials(plan.slots_per_trial)
    tuner.record(0, profiled(weightless(ceiling)))
    return tuner, journal


def _events_of(plan: Plan, world: World, *, slots: int) -> list[Event]:
    tuner, journal = _tuner(plan)
    drive(tuner, world, slots=slots)
    return journal.events


def _configs(run: Run) -> list[str]:
    return [
        json.dumps(trial.overrides, sort_keys=True)
        for trial in run.trials.values()
        if trial.kind is not TrialKind.PROFILE
    ]


# -- the order of things


def test_profile_first_then_the_users_own_batch_then_the_search() -> None:
    plan = plan_of(own_batch=BatchTriple(24, 6, 4))
    tuner, journal = _tuner(plan)

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
    tuner, _ = _begun(plan_of(metric=metric))
    beaten = []
    for value in (5.0, 9.0, 7.0, 1.0):
        (trial,) = tuner.next_trials(1)
        beaten.append(dict(trial.to_beat))
        tuner.record(trial.id, ran(value, metric))
    best = [{}, {metric: 5.0}, {metric: 9.0}, {metric: 9.0}]
    assert beaten == (best if known else [{}] * 4)


def test_profile_keeps_to_divisible_by() -> None:
    tuner, _ = _tuner(plan_of(divisible_by=4, slots_per_trial=2))
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
    tuner, _ = _tuner(plan_of(base_config={} if zero is None else {"zero_optimization": zero}))
    (profile,) = tuner.next_trials(1)
    assert profile.overrides.get("zero_optimization") == expected


def test_buckets_larger_than_the_profiled_model_are_not_searched() -> None:
    plan = plan_of(zero_stages=(1,))
    tuner, _ = _begun(plan, ceiling=1)  # of a model without parameters
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
                assert not tuner.search_began, "the outcome builds the search"
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
    tuner, journal = _tuner(plan_of(max_trials=max_trials))
    drive(tuner, World(), slots=4)
    assert len(tuner.run.trials) == max_trials
    assert tuner.stop_reason == f"all {max_trials} trials are done"
    assert tuner.finished and not tuner.failed
    assert journal.events[-1]["event"] == "stopped"
    assert journal.events[-1]["reason"] == tuner.stop_reason


def test_the_run_goes_on_while_the_last_trials_run() -> None:
    tuner, _ = _begun(plan_of(max_trials=3))
    assert [trial.id for trial in tuner.next_trials(5)] == [1, 2]
    assert tuner.stop_reason is not None and not tuner.finished
    tuner.record(2, ran())
    assert not tuner.finished
    tuner.record(1, ran())
    assert tuner.finished


@pytest.mark.parametrize(
    ("slots_per_trial", "free_slots", "started"),
    [(1, 0, 0), (1, 1, 1), (1, 3, 3), (2, 1, 0), (2, 2, 1), (2, 5, 2), (4, 8, 2)],
)
def test_trials_fill_the_free_slots(slots_per_trial: int, free_slots: int, started: int) -> None:
    tuner, _ = _begun(
        plan_of(slots_per_trial=slots_per_trial, own_batch=BatchTriple(4, 4, 1)), ceiling=15
    )
    assert len(tuner.next_trials(free_slots)) == started


def test_an_exhausted_search_ends_the_run_when_nothing_runs() -> None:
    tuner, journal = _begun(plan_of(**ONE_LINEAGE, own_batch=BatchTriple(3, 3, 1)), ceiling=1)
    assert [trial.kind for trial in tuner.next_trials(3)] == [TrialKind.BASELINE, TrialKind.SEARCH]
    assert tuner.stop_reason is None
    tuner.record(2, failed("OOM"))
    assert tuner.next_trials(3) == []
    assert tuner.stop_reason is None, "the baseline may still change something"
    tuner.record(1, ran())
    assert tuner.stop_reason is None, "the search was not asked since"
    assert tuner.next_trials(3) == []
    assert tuner.stop_reason == "nothing is left to try"
    assert [event["event"] for event in journal.events].count("waiting") == 3


def test_a_search_that_waits_is_not_asked_again_before_something_ended() -> None:
    tuner, journal = _begun(plan_of(**ONE_LINEAGE, own_batch=BatchTriple(3, 3, 1)))
    assert len(tuner.next_trials(3)) == 2
    for _ in range(3):
        assert tuner.next_trials(3) == []
    assert [event["event"] for event in journal.events].count("waiting") == 1


def test_a_search_that_gives_up_ends_the_run() -> None:
    plan = plan_of("random", search_options={"early_stopping": 2}, max_trials=99)
    tuner, _ = _begun(plan)
    value = 10.0
    while (trials := tuner.next_trials(1)) and len(tuner.run.trials) < 50:
        tuner.record(trials[0].id, ran(value := value - 0.1))
    assert [trial.kind for trial in tuner.run.trials.values()].count(TrialKind.SEARCH) == 2
    assert tuner.stop_reason == "no better configuration in the last 2 trials"


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
    tuner, journal = _tuner(plan_of(own_batch=BatchTriple(1, 1, 1), zero_stages=(0,)))
    tuner.next_trials(1)
    tuner.record(0, replace(failed(kind, "it broke"), profile=weightless(15)))
    assert tuner.failed and tuner.finished
    assert tuner.next_trials(1) == []
    tuner.stop()
    assert journal.events[-1]["reason"] == f"the profile trial {said}: it broke"


def _climbing(**changes: Any) -> Plan:
    """Slots with memory of their own, on which the user trains in stage 1."""
    base = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"}}
    return plan_of(**{"base_config": base, "offload_helps": True, "slots_per_trial": 2, **changes})


def test_a_model_that_does_not_fit_climbs_the_ladder() -> None:
    tuner, journal = _tuner(_climbing(max_trials=30))
    profiles = []
    for kind in ("OOM", "OOM", "ERROR"):  # an operator may not compile: that is no reason to stop
        (trial,) = tuner.next_trials(2)
        profiles.append(trial)
        tuner.record(trial.id, failed(kind))
    (last,) = tuner.next_trials(2)
    assert [trial.kind for trial in [*profiles, last]] == [TrialKind.PROFILE] * 4
    climbed = [trial.strategy for trial in [*profiles, last]]
    assert climbed == ["z1", "z2_offload", "z3_offload", "z3_offload"]
    assert [trial.batch.micro_batch for trial in [*profiles, last]] == [1, 1, 1, 4]
    buckets = {"reduce_bucket_size": 10**6}
    offload = {"offload_optimizer": {"device": "cpu"}}
    assert last.overrides["zero_optimization"] == {"stage": 3, **offload, **buckets}
    tuner.record(last.id, profiled(weightless(15)))
    drive(tuner, World(), slots=2)
    kinds = [trial.kind for trial in tuner.run.trials.values()]
    assert TrialKind.BASELINE not in kinds, "it is known not to fit"
    searched = {t.strategy for t in tuner.run.trials.values() if t.kind is TrialKind.SEARCH}
    assert searched == {"z3_offload", "z3_offload_param"}
    assert tuner.run.best is not None
    resumed, _ = _tuner(tuner.plan, journal.events)
    assert resumed.run.trials.keys() == tuner.run.trials.keys()


def test_the_top_of_the_ladder_ends_the_run() -> None:
    tuner, _ = _tuner(_climbing(own_batch=BatchTriple(1, 1, 1)))
    while trials := tuner.next_trials(2):
        tuner.record(trials[0].id, failed("OOM", "too large"))
    assert [trial.strategy for trial in tuner.run.trials.values()] == [
        *("z1", "z2_offload", "z3_offload", "z3_offload_param")
    ]
    assert tuner.failed
    assert tuner.stop_reason == "the profile trial ran out of memory: too large"


def test_a_timeout_is_no_reason_to_climb() -> None:
    tuner, _ = _tuner(_climbing())
    tuner.next_trials(2)
    tuner.record(0, failed("TIMEOUT"))
    assert tuner.failed


def test_a_scripts_own_optimizer_may_be_offloaded() -> None:
    base = {"zero_optimization": {"stage": 2}}
    tuner, _ = _tuner(_climbing(base_config=base))
    tuner.next_trials(2)
    tuner.record(0, failed("OOM"))
    (trial,) = tuner.next_trials(2)
    assert trial.overrides["zero_force_ds_cpu_optimizer"] is False
    assert trial.overrides["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_switches_of_the_script_are_part_of_a_trial() -> None:
    changes = {**ONE_LINEAGE, "switches": {"gradient_checkpointing": False}}
    tuner, _ = _begun(plan_of(**changes, own_batch=BatchTriple(8, 8, 1)))
    trials = tuner.next_trials(9)
    assert {t.kind: t.script_args for t in [tuner.run.trials[0], trials[0]]} == {
        TrialKind.PROFILE: {"gradient_checkpointing": False},
        TrialKind.BASELINE: {"gradient_checkpointing": False},
    }
    # The same configuration without checkpointing is the baseline, with it another trial.
    assert [t.script_args for t in trials[1:]] == [{"gradient_checkpointing": True}]
    assert "gradient_checkpointing" not in json.dumps(trials[1].overrides)


def test_a_profile_that_reported_nothing_ends_the_run() -> None:
    tuner, _ = _tuner(plan_of())
    tuner.next_trials(1)
    tuner.record(0, ran())
    assert tuner.failed


@pytest.mark.parametrize(
    ("metric", "flops", "fails"),
    [("FLOPS_per_gpu", 0.0, True), ("FLOPS_per_gpu", 1.0, False), ("throughput", 0.0, False)],
)
def test_a_model_whose_flops_were_not_counted(metric: str, flops: float, fails: bool) -> None:
    tuner, _ = _tuner(plan_of(metric=metric))
    tuner.next_trials(1)
    profile = ModelProfile(**{**weightless(15).to_json(), "flops_per_sample": flops})
    tuner.record(0, profiled(profile))
    assert tuner.failed == fails
    assert ("--metric throughput" in (tuner.stop_reason or "")) == fails


@pytest.mark.parametrize("tokens", [None, 1e5])
def test_a_script_whose_tokens_were_not_counted(tokens: float | None) -> None:
    tuner, _ = _tuner(plan_of(metric="tokens_per_second"))
    tuner.next_trials(1)
    measured = ran(1.0).metrics
    assert measured is not None
    measured = replace(measured, tokens_per_second=tokens)
    tuner.record(0, replace(profiled(weightless(15)), metrics=measured))
    assert tuner.failed == (tokens is None)
    assert ("no tokens could be counted" in (tuner.stop_reason or "")) == (tokens is None)


def test_a_second_outcome_of_a_trial_is_ignored() -> None:
    tuner, journal = _begun(plan_of())
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
    events = _events_of(plan, World(), slots=1)
    tuner, journal = _tuner(plan, events)
    tuner.stop()
    assert journal.events == events


@pytest.mark.parametrize("method", ["asha", "binary", "random"])  # they begin in the middle
def test_the_plan_reaches_the_search(method: str) -> None:
    def first(**changes: Any) -> Trial:
        tuner, _ = _begun(plan_of(method, zero_stages=(2,), **changes))
        return tuner.next_trials(2)[1]

    assert first().stage == 2
    beyond = first(search_options={"search_range_factor": 2.0})
    assert beyond.batch.micro_batch > first().batch.micro_batch


@pytest.mark.parametrize("method", SEARCHES)
def test_the_seed_decides_the_trials(method: str) -> None:
    def configs(seed: int) -> list[str]:
        tuner, _ = _tuner(plan_of(method, seed=seed))
        drive(tuner, World(), slots=2)
        return _configs(tuner.run)

    assert configs(1) == configs(1)
    assert (configs(1) != configs(2)) == (method != "gridsearch")


def test_what_the_user_set_by_hand_is_not_searched() -> None:
    config = {"zero_optimization": {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 77}}
    plan = plan_of(base_config=config, zero_stages=(2,), slots_per_trial=2)
    tuner, _ = _begun(plan)
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
    tuner, _ = _tuner(plan)
    drive(tuner, World(), slots=6)
    searched = [t for t in tuner.run.trials.values() if t.kind is TrialKind.SEARCH]
    assert {trial.batch.micro_batch for trial in searched} <= {3, 6, 12, 24}
    assert len({trial.batch.micro_batch for trial in searched}) > 1
    for trial in searched:
        assert trial.batch.train_batch_size == 48
        assert trial.batch.micro_batch * trial.batch.gas * 2 == 48


# -- a configuration that was tried already


def test_an_earlier_outcome_stands_in_for_an_equal_proposal() -> None:
    # The bisection of 1..15 begins with the user's own micro batch of 8.
    tuner, journal = _begun(plan_of(**ONE_LINEAGE, own_batch=BatchTriple(8, 8, 1)))
    (baseline,) = tuner.next_trials(1)
    tuner.record(baseline.id, failed("OOM"))
    (below,) = tuner.next_trials(1)
    assert below.batch.micro_batch == 4
    assert below.id == 2
    tuner.record(below.id, ran())
    (above,) = tuner.next_trials(1)
    assert above.batch.micro_batch == 6
    assert len(_configs(tuner.run)) == len(set(_configs(tuner.run))) == 3
    assert [event["event"] for event in journal.events[3:]] == ["proposed", "finished"] * 2 + [
        "proposed"
    ]


@pytest.mark.parametrize(("outcome", "next_micro_batch"), [("OK", 12), ("OOM", 4)])
def test_an_equal_proposal_waits_for_the_trial_that_runs(
    outcome: str, next_micro_batch: int
) -> None:
    tuner, _ = _begun(plan_of(**ONE_LINEAGE, own_batch=BatchTriple(8, 8, 1)))
    (baseline,) = tuner.next_trials(3)
    assert tuner.stop_reason is None
    tuner.record(baseline.id, ran() if outcome == "OK" else failed(outcome))
    (following,) = tuner.next_trials(3)
    assert following.batch.micro_batch == next_micro_batch
    tuner.record(following.id, failed("ERROR"))
    assert tuner.next_trials(3) == []
    assert tuner.stop_reason == "nothing is left to try"


def test_other_lineages_go_on_while_an_equal_proposal_waits() -> None:
    # Stage 1 has nothing else to search; stage 3 has sub_group_size.
    changes = {**ONE_LINEAGE, "zero_stages": (1, 3), "choices": {"sub_group_size": (7, 8)}}
    plan = plan_of(**changes, own_batch=BatchTriple(8, 8, 1))
    tuner, _ = _begun(plan)
    baseline, *others = tuner.next_trials(9)
    assert (baseline.kind, baseline.stage) == (TrialKind.BASELINE, 1)
    assert [(trial.stage, trial.batch.micro_batch) for trial in others] == [(3, 8), (3, 8)]
    tuner.record(baseline.id, ran())
    (following,) = tuner.next_trials(9)
    assert (following.stage, following.batch.micro_batch) == (1, 12)


@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize("own", [4, 8, 20])
def test_no_configuration_runs_twice(method: str, own: int) -> None:
    plan = plan_of(
        method,
        **{**ONE_LINEAGE, "zero_stages": (1, 2)},
        own_batch=BatchTriple(own, own, 1),
        max_trials=40,
    )
    tuner, _ = _tuner(plan)
    drive(tuner, World(), slots=3)
    merged = [
        ds_config.fingerprint(ds_config.merge(plan.base_config, trial.overrides))
        for trial in tuner.run.trials.values()
        if trial.kind is not TrialKind.PROFILE
    ]
    assert len(merged) == len(set(merged)) > 5


def test_the_profile_is_no_measurement_of_its_configuration() -> None:
    buckets = {
        "reduce_bucket_size": 1000,
        "allgather_bucket_size": 1000,
        "contiguous_gradients": True,
    }
    plan = plan_of(
        zero_stages=(1,),
        base_config={"zero_optimization": {"stage": 1, **buckets}},
        own_batch=BatchTriple(3, 3, 1),
    )
    tuner, _ = _begun(plan, ceiling=1)
    profile = tuner.run.trials[0]
    _, searched = tuner.next_trials(2)
    assert searched.batch == profile.batch
    assert ds_config.merge(plan.base_config, searched.overrides) == ds_config.merge(
        plan.base_config, profile.overrides
    )


# -- resuming


@pytest.mark.slow  # replays a run once for every event of it
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize("twins", [False, True])
def test_a_run_cut_off_after_any_event_continues_as_if_it_were_not(
    method: str, slots: int, twins: bool
) -> None:
    changes: dict[str, Any] = {"max_trials": 12 if method == "model" else 25}
    if twins:
        changes |= {**ONE_LINEAGE, "zero_stages": (1, 2), "own_batch": BatchTriple(20, 20, 1)}
    plan = plan_of(method, **changes)
    whole = _events_of(plan, World(), slots=slots)
    assert len(whole) > 10
    for count in range(len(whole) + 1):
        tuner, journal = _tuner(plan, whole[:count])
        drive(tuner, World(), slots=slots)
        assert journal.events == whole


def test_a_resumed_run_knows_what_ran_when_it_was_cut_off() -> None:
    plan = plan_of()
    tuner, journal = _begun(plan)
    started = tuner.next_trials(3)
    tuner.record(started[1].id, ran())
    resumed, _ = _tuner(plan, journal.events)
    assert resumed.run.running == [started[0], started[2]]
    assert len(resumed.next_trials(1)) == 1


@pytest.mark.parametrize("method", SEARCHES)
def test_a_finished_run_continues_with_more_trials(method: str) -> None:
    short = _events_of(plan_of(method, max_trials=8), World(), slots=1)
    long = _events_of(plan_of(method, max_trials=15), World(), slots=1)
    tuner, journal = _tuner(plan_of(method, max_trials=15), short)
    assert not tuner.finished
    drive(tuner, World(), slots=1)

    def essence(events: list[Event]) -> list[tuple[Any, Any]]:
        return [
            (event.get("trial"), event.get("outcome"))
            for event in events
            if event["event"] in ("proposed", "finished")
        ]

    assert len(tuner.run.trials) == 15
    assert essence(journal.events) == essence(long)
    assert [e["reason"] for e in journal.events if e["event"] == "stopped"] == [
        "all 8 trials are done",
        "all 15 trials are done",
    ]
    first_stop = [event["event"] for event in journal.events].index("stopped")
    assert Run(journal.events[: first_stop + 1]).stop_reason == "all 8 trials are done"
    assert Run(journal.events[: first_stop + 2]).stop_reason is None
    assert Run(journal.events).stop_reason == "all 15 trials are done"
    plan = Run(journal.events).plan
    assert plan is not None
    assert plan.max_trials == 15


def test_a_run_continued_with_fewer_trials_than_it_had_is_over() -> None:
    events = _events_of(plan_of(max_trials=12), World(), slots=1)
    tuner, _ = _tuner(plan_of(max_trials=5), events)
    assert len(tuner.run.trials) == 12
    assert tuner.next_trials(1) == []
    assert tuner.finished


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("seed", 8, "random seed was 7, now 8"),
        ("method", "asha", "method was binary, now asha"),
        ("metric", "latency", "metric was throughput, now latency"),
        ("zero_stages", (1, 2), "ZeRO stages was"),
        ("slots_per_trial", 2, "slots per trial was 1, now 2"),
        ("base_config", {}, "DeepSpeed configuration"),
        ("own_batch", BatchTriple(8, 8, 1), "own train_batch_size was"),
        ("search_options", {"divisor": 4}, "option of the search divisor was not given, now 4"),
        ("train_batch_size", 4, "train batch size was not given, now 4"),
        ("divisible_by", 2, "divisible by was 1, now 2"),
        ("slot_memory_bytes", 2**30, "slot memory was not given, now 1GiB"),
        ("measured", {"program": "another"}, "now another"),
    ],
)
def test_another_plan_cannot_continue_a_run(field: str, value: Any, said: str) -> None:
    events = _events_of(plan_of(max_trials=3), World(), slots=1)
    with pytest.raises(JournalMismatch, match=re.escape("Cannot resume: ")) as found:
        _tuner(plan_of(**{"max_trials": 3, field: value}), events)
    assert said in str(found.value)


def test_a_proposal_that_would_not_be_made_today_is_a_mismatch() -> None:
    events = _events_of(plan_of(max_trials=6), World(), slots=1)
    position = max(n for n, event in enumerate(events) if event["event"] == "proposed")
    events[position]["trial"]["batch"]["micro_batch"] += 1
    name = events[position]["trial"]["name"]
    with pytest.raises(JournalMismatch, match=f"trial 5 was {name}"):
        _tuner(plan_of(max_trials=6), events)


def test_a_proposal_where_there_is_nothing_to_try_is_a_mismatch() -> None:
    events = _events_of(plan_of(max_trials=6), World(), slots=1)
    premature = [event for event in events if event["event"] != "finished"]
    with pytest.raises(JournalMismatch, match="decides nothing"):
        _tuner(plan_of(max_trials=6), premature)


@pytest.mark.parametrize("last", [False, True])
def test_a_pause_where_there_was_something_to_try_is_a_mismatch(last: bool) -> None:
    events = _events_of(plan_of(max_trials=6), World(), slots=1)
    position = [event["event"] for event in events].index("finished") + 1
    events.insert(position, {"event": "waiting", "elapsed_s": 0.0})
    with pytest.raises(JournalMismatch, match="waited"):
        _tuner(plan_of(max_trials=6), events[: position + 1] if last else events)


def test_the_pause_between_two_sessions_is_no_running_time() -> None:
    plan = plan_of(max_trials=2)
    clock = FakeClock()
    first = MemoryJournal([])
    tuner = Tuner(plan, first, clock=clock)
    tuner.next_trials(1)
    clock.now_s += 10_000
    resumed = Tuner(plan, MemoryJournal([]), events=first.events, clock=clock)
    resumed.record(0, profiled(weightless(15)))
    assert [event["elapsed_s"] for event in first.events] == [1.0, 1.0]
    assert resumed.run.running_s == 3.0


# -- names and the best


@pytest.mark.parametrize("method", SEARCHES)
def test_trial_names_say_what_they_are_and_are_unique(method: str) -> None:
    tuner, _ = _tuner(plan_of(method, max_trials=60, zero_stages=(0, 1, 2, 3)))
    drive(tuner, World(), slots=4)
    trials = tuner.run.trials.values()
    assert len({trial.name for trial in trials}) == len(trials) > 30
    for trial in trials:
        kind = "" if trial.kind is TrialKind.SEARCH else f"{trial.kind.value}_"
        stem = f"{kind}z{trial.stage}_gas{trial.batch.gas}_tmbspg{trial.batch.micro_batch}"
        assert trial.name.startswith(stem)
        assert trial.name == stem or len(trial.name) == len(stem) + 5


def test_names_of_equal_digests_grow_until_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(config: Mapping[str, Any]) -> str:
        return "abcd" + str(config["config"]["zero_optimization"].get("sub_group_size", ""))

    monkeypatch.setattr(ds_config, "fingerprint", digest)
    changes = {**ONE_LINEAGE, "zero_stages": (3,), "choices": {"sub_group_size": (7, 8, 9)}}
    tuner, _ = _begun(plan_of(**changes, own_batch=BatchTriple(3, 3, 1)))
    (baseline,) = tuner.next_trials(1)
    tuner.record(baseline.id, ran())
    names = [trial.name for trial in tuner.next_trials(5)]
    assert names[:2] == ["z3_gas1_tmbspg8", "z3_gas1_tmbspg8_abcd"]
    assert names[2] in ("z3_gas1_tmbspg8_abcd8", "z3_gas1_tmbspg8_abcd9")
    assert len(names) == 3


def _recorded(plan: Plan, *values: tuple[BatchTriple, Outcome]) -> Run:
    """A run with these trials in this order; the first is the baseline."""
    run = Run([{"event": "start", "plan": plan.to_json(), "info": {}}])
    profile = Trial(0, TrialKind.PROFILE, "profile", 0, BatchTriple(1, 1, 1), {})
    run.apply({"event": "proposed", "trial": profile})
    run.apply({"event": "finished", "trial_id": 0, "outcome": ran(1e6)})
    for trial_id, (batch, outcome) in enumerate(values, start=1):
        kind = TrialKind.BASELINE if trial_id == 1 else TrialKind.SEARCH
        trial = Trial(trial_id, kind, f"t{trial_id}", 1, batch, batch.config())
        run.apply({"event": "proposed", "trial": trial})
        run.apply({"event": "finished", "trial_id": trial_id, "outcome": outcome})
    return run


@pytest.mark.parametrize(
    ("changes", "best"),
    [
        ({}, 4),
        ({"train_batch_size": 12}, 2),
        ({"divisible_by": 4}, 3),
        ({"train_batch_size": 16, "divisible_by": 8}, None),
    ],
)
def test_the_best_keeps_to_what_was_demanded(changes: dict[str, Any], best: int | None) -> None:
    run = _recorded(
        plan_of(**changes),
        (BatchTriple(6, 3, 1), ran(20)),
        (BatchTriple(12, 3, 2), ran(30)),
        (BatchTriple(16, 4, 2), ran(25)),
        (BatchTriple(10, 5, 1), ran(40)),
        (BatchTriple(12, 3, 2), failed("OOM")),
    )
    assert (None if run.best is None else run.best.id) == best
    assert run.best_value == (None if best is None else run.value(run.trials[best]))


def test_a_baseline_of_another_batch_size_is_measured_but_never_the_best() -> None:
    plan = plan_of(train_batch_size=16, own_batch=BatchTriple(4, 4, 1), max_trials=6)
    tuner, _ = _begun(plan)
    while trials := tuner.next_trials(1):
        (trial,) = trials
        tuner.record(trial.id, ran(1000.0 if trial.kind is TrialKind.BASELINE else 1.0))
    assert tuner.run.baseline is not None
    assert tuner.run.value(tuner.run.baseline) == 1000.0
    assert tuner.run.best is not None and tuner.run.best_value == 1.0


def test_the_best_of_a_latency_is_the_smallest_and_ties_keep_the_first() -> None:
    batch = BatchTriple(4, 4, 1)
    run = _recorded(
        plan_of(metric="latency"),
        (batch, ran(30, "latency")),
        (batch, ran(40, "latency")),
        (batch, ran(20, "latency")),
        (batch, ran(20, "latency")),
        (batch, failed("ERROR")),
    )
    assert run.best is not None and run.best.id == 3
    assert run.trials_since_best == 2
    assert (run.count(OutcomeKind.OK), run.count(OutcomeKind.ERROR)) == (5, 1)


def test_a_run_skips_events_of_a_kind_it_does_not_know() -> None:
    run = _recorded(plan_of())
    run.apply({"event": "from the future", "elapsed_s": 2.0})
    assert run.running_s == 2.0


def test_stage_0_said_and_unsaid_is_one_configuration() -> None:
    def micro_batches(plan: Plan) -> list[int]:
        tuner, _ = _tuner(plan)
        drive(tuner, World(), slots=1)
        return [t.batch.micro_batch for t in tuner.run.trials.values()][1:]

    plan = plan_of(zero_stages=(0,), max_trials=40)
    assert "zero_optimization" not in plan.base_config
    searched = micro_batches(plan)[1]
    again = micro_batches(replace(plan, own_batch=BatchTriple(searched, searched, 1)))
    assert again.count(searched) == 1


def test_a_profile_that_crashes_is_tried_again_with_the_users_own_micro_batch() -> None:
    events: list[Event] = []
    for outcome in (profiled(weightless(15)), failed("ERROR", "broken too")):
        tuner, journal = _tuner(plan_of(own_batch=BatchTriple(4, 4, 1)))
        [first] = tuner.next_trials(3)
        assert first.batch.micro_batch == 1
        tuner.record(0, failed("ERROR", "batch normalisation needs more"))
        [again] = tuner.next_trials(3)
        assert (again.id, again.kind, again.batch.micro_batch) == (1, TrialKind.PROFILE, 4)
        assert tuner.next_trials(3) == []
        tuner.record(1, outcome)
        assert tuner.failed is not outcome.ok
        assert [t.kind for t in tuner.next_trials(1)] == [TrialKind.BASELINE] * outcome.ok
        events = journal.events
        resumed, _ = _tuner(plan_of(own_batch=BatchTriple(4, 4, 1)), events)
        assert resumed.run.trials == tuner.run.trials
        assert resumed.stop_reason == tuner.stop_reason


@pytest.mark.parametrize("kind", ["ERROR", "INVALID"])
def test_a_run_in_which_everything_fails_ends_early(kind: str) -> None:
    tuner, _ = _begun(plan_of(max_trials=40))
    while trials := tuner.next_trials(1):
        tuner.record(trials[0].id, failed(kind, "a bug in the fourth step"))
    assert len(tuner.run.trials) == 1 + HOPELESS_AFTER
    assert tuner.stop_reason == "every trial failed, and none ran out of memory"


@pytest.mark.parametrize("hope", [ran(1.0), failed("OOM"), failed("TIMEOUT")])
def test_one_trial_that_did_not_fail_so_is_hope(hope: Outcome) -> None:
    tuner, _ = _begun(plan_of(max_trials=12))
    [first] = tuner.next_trials(1)
    tuner.record(first.id, hope)
    while trials := tuner.next_trials(1):
        tuner.record(trials[0].id, failed("ERROR"))
    assert len(tuner.run.trials) > 1 + HOPELESS_AFTER
    assert tuner.stop_reason == "nothing is left to try"


def test_too_large_a_micro_batch_for_the_data_shrinks() -> None:
    tuner, _ = _begun(plan_of(max_trials=30, zero_stages=(1,)))
    short = replace(failed("INVALID", "the script ended"), smaller_may_run=True)
    while trials := tuner.next_trials(1):
        fits = trials[0].batch.micro_batch <= 3
        tuner.record(trials[0].id, ran(trials[0].batch.micro_batch) if fits else short)
    assert tuner.run.best is not None
    assert tuner.run.best.batch.micro_batch == 3


# -- errors that no other configuration mends, and one that another stage does


def test_an_error_before_the_engine_is_not_tried_with_another_batch() -> None:
    tuner, _ = _tuner(plan_of(own_batch=BatchTriple(4, 4, 1)))
    tuner.next_trials(1)
    early = replace(failed("ERROR", "No module named 'nonsense'"), before_engine=True)
    tuner.record(0, early)
    assert tuner.next_trials(1) == [] and tuner.failed
    assert "nonsense" in (tuner.stop_reason or "")


@pytest.mark.parametrize(
    ("second", "profiled_after"),
    [("the same error", False), (None, True)],
    ids=["the script's own error", "what only stage 0 forbids"],
)
def test_what_deepspeed_refuses_at_stage_0_is_tried_with_the_other_stages(
    second: str | None, profiled_after: bool
) -> None:
    tuner, _ = _tuner(plan_of(zero_stages=(0, 1, 2, 3), own_batch=BatchTriple(1, 1, 1)))
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
    assert tuner.failed is not profiled_after
    assert bool(stages) is profiled_after and 0 not in stages
