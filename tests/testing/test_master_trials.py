"""The fake master's trials: events, slots, ends, restarts, reports that are refused."""

from __future__ import annotations

import pytest

from testing.master.errors import ApiError
from testing.master.states import State
from testing.master_bench import (
    A,
    B,
    Bench,
    C,
    close,
    create,
    state_of,
    validate_after,
)


def test_events_count_from_one_and_stay_until_they_are_acknowledged() -> None:
    bench = Bench()
    assert bench.experiment.events() == [{"id": 1, "initialOperations": {"placeholder": 0}}]
    bench.post(create(A), create(B))
    assert [event["id"] for event in bench.experiment.events()] == [2, 3]
    assert bench.events == [f"trialCreated {A}", f"trialCreated {B}"]
    assert bench.events == [f"trialCreated {A}", f"trialCreated {B}"]
    bench.post(event=2)
    assert bench.events == [f"trialCreated {B}"]


@pytest.mark.parametrize("event", [-1, 0, 1, 4])
def test_operations_for_an_event_that_is_not_in_the_queue_are_refused_whole(event: int) -> None:
    bench = Bench()
    bench.post(create(A), create(B))
    with pytest.raises(ApiError, match="failed to remove events from queue") as error:
        bench.post(create(C), event=event)
    assert error.value.status == 500
    assert set(bench.experiment.trials) == {A, B}
    assert len(bench.events) == 2


def test_the_progress_that_a_searcher_sets_is_saved_when_a_trial_reports_its_own() -> None:
    bench = Bench()
    trial = bench.create()
    bench.experiment.report_progress(trial, 0)
    bench.post({"setSearcherProgress": {"progress": 0.5}})
    assert bench.experiment.progress == 0.0
    bench.experiment.report_progress(trial, 0)
    assert bench.experiment.progress == 0.5


def test_a_report_and_progress_become_events() -> None:
    bench = Bench()
    trial = bench.create()
    bench.experiment.report_progress(trial, 2.5)
    bench.report(trial, metric={"any": ["json"]})
    assert [event for event in bench.experiment.events() if event["id"] > 2] == [
        {"id": 3, "trialProgress": {"requestId": A, "partialUnits": 2.5}},
        {
            "id": 4,
            "validationCompleted": {
                "requestId": A,
                "metric": {"any": ["json"]},
                "validateAfterLength": "5",
            },
        },
    ]


def test_a_trial_gets_slots_only_for_an_operation() -> None:
    bench = Bench()
    bench.post(create(A))
    assert not bench.started
    bench.post(validate_after(A, 5))
    [allocation] = bench.started
    assert allocation.id == f"{bench.experiment.trials[A].task_id}.1"


def test_trials_wait_for_slots_in_their_order() -> None:
    bench = Bench(nodes=(2,))
    bench.create(A, B, C)
    assert len(bench.started) == 2
    bench.exits(bench.experiment.trials[A])
    assert [each.task_id[-4:] for each in bench.started] == [A, B, C]


def test_more_slots_than_a_node_has_are_whole_nodes() -> None:
    bench = Bench(nodes=(2, 2), slots=4)
    allocation = bench.create().allocation
    assert allocation is not None
    assert [each.slot_ids for each in allocation.containers] == [(0, 1), (0, 1)]
    assert [each.address for each in allocation.containers] == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.parametrize("slots", [3, 5])
def test_more_slots_than_can_be_had_are_refused(slots: int) -> None:
    with pytest.raises(ApiError, match="slots requested exceeds cluster capacity"):
        Bench(nodes=(2, 2), slots=slots)


def test_a_closed_trial_that_acknowledges_ends_well() -> None:
    bench = Bench()
    trial = bench.create()
    bench.report(trial)
    bench.post(close(A))
    assert state_of(trial) is State.STOPPING_COMPLETED
    assert trial.allocation is not None
    assert trial.allocation.preempt
    assert bench.events == []
    bench.exits(trial, acknowledged=True)
    assert state_of(trial) is State.COMPLETED
    assert bench.events == [f"trialClosed {A}"]


def test_a_closed_trial_that_crashes_on_its_way_out_is_an_error() -> None:
    bench = Bench()
    trial = bench.create()
    bench.report(trial)
    bench.post(close(A))
    bench.exits(trial, 1)
    assert state_of(trial) is State.ERROR
    assert bench.events == [f"trialExitedEarly {A} UNSPECIFIED", f"trialClosed {A}"]


def test_exit_0_without_a_report_only_closes() -> None:
    bench = Bench(max_restarts=3)
    trial = bench.create()
    bench.exits(trial)
    assert state_of(trial) is State.COMPLETED
    assert bench.events == [f"trialClosed {A}"]


def test_failures_start_again_up_to_max_restarts_with_the_same_id() -> None:
    bench = Bench(max_restarts=2)
    trial = bench.create()
    for run in (1, 2):
        assert (trial.run_id, trial.restarts) == (run, run - 1)
        bench.exits(trial, 1)
        assert bench.events == []
    bench.exits(trial, 1)
    assert state_of(trial) is State.ERROR
    assert (trial.run_id, trial.restarts) == (3, 3)
    assert bench.events == [f"trialExitedEarly {A} UNSPECIFIED", f"trialClosed {A}"]
    assert [each.id[-2:] for each in bench.started] == [".1", ".2", ".3"]
    assert bench.experiment.state is State.ACTIVE


def test_a_restart_begins_with_the_latest_checkpoint() -> None:
    bench = Bench(max_restarts=1)
    trial = bench.create()
    assert bench.cluster.latest_checkpoint(trial) is None
    for uuid in ("first", "second"):
        bench.cluster.report_checkpoint(
            {"uuid": uuid, "taskId": trial.task_id, "state": "STATE_COMPLETED"}
        )
    latest = bench.cluster.latest_checkpoint(trial)
    assert latest is not None
    assert latest["uuid"] == "second"


def test_invalid_hyperparameters_only_close() -> None:
    bench = Bench(max_restarts=3)
    trial = bench.create()
    bench.cluster.early_exit(trial.id, "EXITED_REASON_INVALID_HP")
    bench.exits(trial)
    assert state_of(trial) is State.COMPLETED
    assert bench.events == [f"trialClosed {A}"]


@pytest.mark.parametrize(("length", "said"), [(4, "expected op"), (5, "previously completed")])
def test_a_report_of_the_wrong_operation_is_refused(length: int, said: str) -> None:
    bench = Bench()
    trial = bench.create()
    bench.report(trial)
    with pytest.raises(ApiError, match=said) as error:
        bench.report(trial, length)
    assert error.value.status == 400
