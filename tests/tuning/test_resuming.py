"""A run that was cut off goes on, and one that was decided otherwise is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from dsat.errors import JournalMismatch
from dsat.search import SEARCHES
from dsat.space.knobs import KNOBS
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.trial import BatchTriple
from testing.helpers import (
    Event,
    FakeClock,
    World,
    drive,
    plan_of,
    profiled,
    ran,
    weightless,
)
from testing.tuners import begun, events_of, tuner_of


@pytest.mark.slow
@pytest.mark.parametrize("ramp", [False, True])
@pytest.mark.parametrize("method", SEARCHES)
def test_a_run_cut_off_after_any_event_continues_as_if_it_were_not(method: str, ramp: bool) -> None:
    plan = plan_of(method, max_trials=10 if method == "model" else 20, ramp=ramp)
    whole = events_of(plan, World(), slots=3)
    assert len(whole) > 10
    most = 1 if method == "model" else 3
    cuts = np.random.default_rng(len(whole)).choice(len(whole) + 1, size=most, replace=False)
    for count in (*map(int, cuts), len(whole)):
        tuner, journal = tuner_of(plan, whole[:count])
        drive(tuner, World(), slots=3)
        assert journal.events == whole


def test_a_resumed_run_knows_what_ran_when_it_was_cut_off() -> None:
    plan = plan_of()
    tuner, journal = begun(plan)
    started = tuner.next_trials(3)
    tuner.record(started[1].id, ran())
    resumed, _ = tuner_of(plan, journal.events)
    assert resumed.run.running == [started[0], started[2]]
    assert len(resumed.next_trials(1)) == 1


def test_a_finished_run_continues_with_more_trials_and_is_over_with_fewer() -> None:
    short = events_of(plan_of(max_trials=8), World(), slots=1)
    long = events_of(plan_of(max_trials=15), World(), slots=1)
    fewer, _ = tuner_of(plan_of(max_trials=5), short)
    assert len(fewer.run.trials) == 8 and fewer.finished and fewer.next_trials(1) == []
    tuner, journal = tuner_of(plan_of(max_trials=15), short)
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
        "the budget of 8 trials is used",
        "the budget of 15 trials is used",
    ]
    first_stop = [event["event"] for event in journal.events].index("stopped")
    assert Run(journal.events[: first_stop + 1]).stop_reason == "the budget of 8 trials is used"
    assert Run(journal.events[: first_stop + 2]).stop_reason is None
    assert Run(journal.events).stop_reason == "the budget of 15 trials is used"
    assert Run(journal.events).plan.max_trials == 15


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("seed", 8, "random seed was 7, now 8"),
        ("base_config", {}, "DeepSpeed configuration"),
        ("own_batch", BatchTriple(8, 8, 1), "own train_batch_size was"),
        ("search_options", {"divisor": 4}, "option of the search divisor was not given, now 4"),
        ("slot_memory_bytes", 2**30, "slot memory was not given, now 1GiB"),
        ("measured", {"program": "another"}, "now another"),
    ],
)
def test_another_plan_cannot_continue_a_run(field: str, value: Any, said: str) -> None:
    events = events_of(plan_of(max_trials=3), World(), slots=1)
    with pytest.raises(JournalMismatch, match=re.escape("Cannot resume: ")) as found:
        tuner_of(plan_of(**{"max_trials": 3, field: value}), events)
    assert said in str(found.value)


def test_another_device_cannot_continue_a_run() -> None:
    events = events_of(plan_of(max_trials=3, measured={"device": "A100"}), World(), slots=1)
    with pytest.raises(JournalMismatch, match="device was A100, now H100"):
        tuner_of(plan_of(max_trials=3, measured={"device": "H100"}), events)
    tuner_of(plan_of(max_trials=3), events)
    unknown = events_of(plan_of(max_trials=3), World(), slots=1)
    tuner_of(plan_of(max_trials=3, measured={"device": "H100"}), unknown)


def test_another_deepspeed_cannot_continue_a_run() -> None:
    path = "zero_optimization.offload_optimizer.pin_memory"
    events = events_of(plan_of(max_trials=3, defaults={path: False}), World(), slots=1)
    with pytest.raises(JournalMismatch, match=re.escape(f"default of {path} was false, now true")):
        tuner_of(plan_of(max_trials=3, defaults={path: True}), events)


def test_a_run_that_did_not_ask_deepspeed_goes_on_without_what_came_since() -> None:
    changes: dict[str, Any] = {
        "method": "random",
        "zero_stages": (3,),
        "slots_per_trial": 2,
        "slots_per_host": 1,
        "offload_helps": True,
    }
    today = {"defaults": {knob.path: knob.values[0] for knob in KNOBS}, **changes}
    key = "stage3_use_all_reduce_for_fetch_params"
    assert key in str(events_of(plan_of(max_trials=5, **today), World(), slots=2))
    earlier = events_of(plan_of(max_trials=3, **changes), World(), slots=2)
    resumed, journal = tuner_of(plan_of(max_trials=5, **today), earlier)
    assert resumed.plan.defaults == {}
    drive(resumed, World(), slots=2)
    assert len(resumed.run.trials) == 5
    proposed = [event for event in journal.events if event["event"] == "proposed"]
    assert key not in str(proposed)


def test_a_run_goes_on_with_the_knobs_that_it_began_with() -> None:
    gone, known, new = (f"zero_optimization.{key}" for key in ("gone", "reduce_scatter", "new"))
    earlier = events_of(plan_of(max_trials=3, defaults={gone: 1, known: True}), World(), slots=1)
    resumed, _ = tuner_of(plan_of(max_trials=5, defaults={known: True, new: 2}), earlier)
    assert resumed.plan.defaults == {gone: 1, known: True}


def test_a_proposal_that_would_not_be_made_today_is_a_mismatch() -> None:
    events = events_of(plan_of(max_trials=6), World(), slots=1)
    position = max(n for n, event in enumerate(events) if event["event"] == "proposed")
    events[position]["trial"]["batch"]["micro_batch"] += 1
    name = events[position]["trial"]["name"]
    said = f"batch.micro_batch of trial 5 \\({name}\\) was"
    with pytest.raises(JournalMismatch, match=said):
        tuner_of(plan_of(max_trials=6), events)
    events[position]["trial"]["name"] = "z0_earlier"
    with pytest.raises(JournalMismatch, match="trial 5 was z0_earlier, but z"):
        tuner_of(plan_of(max_trials=6), events)


def test_a_run_goes_on_though_memory_is_predicted_otherwise_today() -> None:
    plan = plan_of(max_trials=6)
    events = events_of(plan, World(), slots=1)
    predicted = [e["trial"] for e in events if e.get("trial", {}).get("predicted_bytes")]
    assert any(trial["kind"] == "search" for trial in predicted)
    for trial in predicted:
        trial["predicted_bytes"] += 1
    resumed, _ = tuner_of(plan, events)
    assert resumed.finished


def test_a_proposal_where_there_is_nothing_to_try_is_a_mismatch() -> None:
    events = events_of(plan_of(max_trials=6), World(), slots=1)
    premature = [event for event in events if event["event"] != "finished"]
    with pytest.raises(JournalMismatch, match="nothing is decided here"):
        tuner_of(plan_of(max_trials=6), premature)


@pytest.mark.parametrize("last", [False, True])
def test_a_pause_where_there_was_something_to_try_is_a_mismatch(last: bool) -> None:
    events = events_of(plan_of(max_trials=6), World(), slots=1)
    position = [event["event"] for event in events].index("finished") + 1
    events.insert(position, {"event": "waiting", "elapsed_s": 0.0})
    with pytest.raises(JournalMismatch, match="waited"):
        tuner_of(plan_of(max_trials=6), events[: position + 1] if last else events)


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
