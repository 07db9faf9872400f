"""The stand-in's state machine: what the real master's sources say of experiments and trials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import yaml

from testing.master.allocation import Allocation
from testing.master.cluster import Cluster
from testing.master.config import normalized, sample
from testing.master.effects import KillContainers, Later, StartContainers
from testing.master.errors import ApiError
from testing.master.experiment import Experiment
from testing.master.states import State
from testing.master.trial import Trial

A, B, C = "aaaa", "bbbb", "cccc"
CUSTOM = {"name": "custom", "metric": "loss"}
SINGLE = {"name": "single", "metric": "loss", "max_length": {"batches": 10}}


class Bench:
    """A cluster whose effects are kept, and an experiment in it."""

    def __init__(
        self,
        searcher: dict[str, Any] = CUSTOM,
        *,
        nodes: Sequence[int] = (2,),
        slots: int = 1,
        max_restarts: int = 0,
        **options: Any,
    ) -> None:
        self.cluster = Cluster(nodes, **options)
        self.started: list[Allocation] = []
        self.killed: list[Allocation] = []
        self.timers: list[Later] = []
        self.deleted: list[str] = []
        config = {
            "entrypoint": "true",
            "searcher": searcher,
            "max_restarts": max_restarts,
            "resources": {"slots_per_trial": slots},
            "hyperparameters": {"lr": 0.1},
        }
        self.experiment = self.submit(config)

    def submit(self, config: dict[str, Any]) -> Experiment:
        experiment = self.cluster.create_experiment(yaml.safe_dump(config), b"", "tester")
        self.drive()
        return experiment

    def drive(self) -> None:
        for effect in self.cluster.take_effects():
            if isinstance(effect, StartContainers):
                self.started.append(effect.allocation)
            elif isinstance(effect, KillContainers):
                self.killed.append(effect.allocation)
            elif isinstance(effect, Later):
                self.timers.append(effect)
            else:
                self.deleted.append(effect.folder.as_posix())

    def post(self, *operations: dict[str, Any], event: int | None = None) -> None:
        """Acknowledges all events, or those up to one, with operations."""
        last = self.experiment.queue.events[-1]["id"] if event is None else event
        self.experiment.post(
            {"triggeredByEvent": {"id": last}, "searcherOperations": list(operations)}
        )
        self.drive()

    def create(self, *request_ids: str, length: int = 5) -> Trial:
        """Trials that run, with all their containers met, without an event; returns the first."""
        names = request_ids or (A,)
        self.post(*(op for name in names for op in (create(name), validate_after(name, length))))
        self.post()
        for name in names:
            self.meet(self.experiment.trials[name])
        return self.experiment.trials[names[0]]

    def meet(self, trial: Trial) -> None:
        assert trial.allocation is not None
        for container in trial.allocation.containers:
            container.asked_rendezvous = True

    def report(self, trial: Trial, length: int = 5, metric: Any = 0.5) -> None:
        self.experiment.complete_operation(trial, length, metric)
        self.drive()

    def exits(self, trial: Trial, code: int = 0, *, acknowledged: bool = False) -> None:
        """All containers of a trial exit."""
        allocation = trial.allocation
        assert allocation is not None
        if acknowledged:
            allocation.acknowledge()
        for container in allocation.containers:
            allocation.container_exited(container.resources_id, code)
        self.drive()

    @property
    def events(self) -> list[str]:
        """Unacknowledged events in short: what, of which trial, why."""
        return [short(event) for event in self.experiment.events()]


def short(event: dict[str, Any]) -> str:
    [(kind, value)] = [(key, value) for key, value in event.items() if key != "id"]
    reason = value.get("exitedReason", "").removeprefix("EXITED_REASON_")
    return " ".join(filter(None, [kind, value.get("requestId"), reason]))


def create(request_id: str) -> dict[str, Any]:
    return {"createTrial": {"requestId": request_id, "hyperparams": '{"lr": 1}'}}


def validate_after(request_id: str, length: int) -> dict[str, Any]:
    operation = {"validateAfter": {"requestId": request_id, "length": str(length)}}
    return {"trialOperation": operation}


def close(request_id: str) -> dict[str, Any]:
    return {"closeTrial": {"requestId": request_id}}


def shut_down(**how: bool) -> dict[str, Any]:
    return {"shutDown": {"cancel": False, "failure": False, **how}}


def state_of(trial: Trial) -> State:
    """For a type checker that takes a state to be what it was asserted to be before."""
    return trial.state


# Events.


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


def test_operations_on_trials_that_nobody_knows_change_nothing() -> None:
    bench = Bench()
    bench.post(validate_after(A, 3), close(B))
    assert not bench.started
    assert bench.experiment.state is State.ACTIVE


# Trials and their slots.


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


def test_a_task_without_slots_runs_beside_a_full_cluster() -> None:
    bench = Bench(nodes=(1,))
    bench.create()
    runner = bench.submit(
        {"entrypoint": "x", "searcher": SINGLE, "resources": {"slots_per_trial": 0}}
    )
    assert bench.started[-1].task_id.startswith(f"{runner.id}.")
    assert bench.started[-1].containers[0].slot_ids == ()


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


# The end of a trial.


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


def test_a_closed_trial_may_be_left_alone() -> None:
    bench = Bench(preempts_closed_trials=False)
    trial = bench.create()
    bench.report(trial)
    bench.post(close(A))
    assert trial.allocation is not None
    assert not trial.allocation.preempt


def test_a_close_that_comes_after_the_exit_closes_at_once() -> None:
    bench = Bench()
    trial = bench.create()
    bench.report(trial)
    bench.exits(trial, acknowledged=True)
    assert state_of(trial) is State.ACTIVE
    bench.post(close(A))
    assert bench.events == [f"trialClosed {A}"]


def test_a_close_before_the_report_takes_effect_with_it() -> None:
    bench = Bench()
    trial = bench.create()
    bench.experiment.report_progress(trial, 1)
    bench.post(close(A))
    assert state_of(trial) is State.ACTIVE
    bench.report(trial)
    assert state_of(trial) is State.STOPPING_COMPLETED


def test_a_closed_trial_that_crashes_on_its_way_out_is_an_error() -> None:
    bench = Bench()
    trial = bench.create()
    bench.report(trial)
    bench.post(close(A))
    bench.exits(trial, 1)
    assert state_of(trial) is State.ERROR
    assert bench.events == [f"trialExitedEarly {A} UNSPECIFIED", f"trialClosed {A}"]


def test_a_closed_trial_that_crashes_after_it_acknowledged_ended_well() -> None:
    bench = Bench()
    trial = bench.create()
    bench.report(trial)
    bench.post(close(A))
    bench.exits(trial, 1, acknowledged=True)
    assert bench.events == [f"trialClosed {A}"]


def test_exit_0_without_a_report_only_closes() -> None:
    bench = Bench(max_restarts=3)
    trial = bench.create()
    bench.exits(trial)
    assert state_of(trial) is State.COMPLETED
    assert bench.events == [f"trialClosed {A}"]


def test_exit_0_that_was_acknowledged_before_the_report_starts_again() -> None:
    bench = Bench()
    trial = bench.create()
    bench.exits(trial, acknowledged=True)
    assert (state_of(trial), trial.run_id, trial.restarts) == (State.ACTIVE, 2, 0)
    assert len(bench.started) == 2


def test_a_trial_between_operations_idles_until_the_next() -> None:
    bench = Bench()
    trial = bench.create()
    bench.report(trial)
    bench.exits(trial, acknowledged=True)
    assert trial.allocation is None
    bench.post(validate_after(A, 10))
    assert trial.allocation is not None
    assert trial.run_id == 2


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


def test_who_stays_after_invalid_hyperparameters_is_killed() -> None:
    bench = Bench()
    trial = bench.create()
    bench.cluster.early_exit(trial.id, "EXITED_REASON_INVALID_HP")
    bench.drive()
    [timer] = bench.timers
    assert timer.delay_s == 10
    timer.call()
    bench.drive()
    assert bench.killed == [trial.allocation]
    bench.exits(trial, 137)
    assert bench.events == [f"trialExitedEarly {A} USER_CANCELED", f"trialClosed {A}"]


def test_other_reasons_of_an_early_exit_are_refused() -> None:
    bench = Bench()
    trial = bench.create()
    with pytest.raises(ApiError) as error:
        bench.cluster.early_exit(trial.id, "EXITED_REASON_USER_REQUESTED_STOP")
    assert error.value.status == 400


# Reports that are refused.


@pytest.mark.parametrize(("length", "said"), [(4, "expected op"), (5, "previously completed")])
def test_a_report_of_the_wrong_operation_is_refused(length: int, said: str) -> None:
    bench = Bench()
    trial = bench.create()
    bench.report(trial)
    with pytest.raises(ApiError, match=said) as error:
        bench.report(trial, length)
    assert error.value.status == 400


def test_an_operation_that_is_given_twice_ends_the_experiment_in_error() -> None:
    bench = Bench()
    trial = bench.create(length=5)
    bench.report(trial)
    bench.post(validate_after(A, 5))
    bench.report(trial)
    assert bench.experiment.state is State.STOPPING_ERROR
    assert bench.killed == [trial.allocation]


# What users do.


def test_a_killed_trial_is_lost_and_no_other() -> None:
    bench = Bench(max_restarts=3)
    trial, other = bench.create(A, B), bench.experiment.trials[B]
    bench.cluster.kill_trial(trial.id)
    bench.drive()
    assert bench.killed == [trial.allocation]
    assert state_of(trial) is State.STOPPING_KILLED
    bench.exits(trial, 137)
    assert state_of(trial) is State.CANCELED
    assert bench.events == [f"trialExitedEarly {A} USER_CANCELED", f"trialClosed {A}"]
    assert other.state is State.ACTIVE
    assert bench.experiment.state is State.ACTIVE


def test_a_trial_that_waits_for_slots_is_killed_at_once() -> None:
    bench = Bench(nodes=(1,))
    bench.create(A, B)
    bench.cluster.kill_trial(bench.experiment.trials[B].id)
    assert bench.events == [f"trialExitedEarly {B} USER_CANCELED", f"trialClosed {B}"]
    bench.drive()
    assert len(bench.started) == 1


def test_pause_and_activate() -> None:
    bench = Bench()
    trial = bench.create()
    assert bench.experiment.change_state(State.PAUSED, "user")
    assert bench.events == ["experimentInactive"]
    [inactive] = bench.experiment.events()
    assert inactive == {"id": -1, "experimentInactive": {"experimentState": "STATE_PAUSED"}}
    assert trial.allocation is not None
    assert trial.allocation.preempt
    bench.exits(trial, acknowledged=True)
    assert (state_of(trial), bench.cluster.scheduler.used) == (State.PAUSED, 0)
    assert bench.experiment.change_state(State.ACTIVE, "user")
    bench.drive()
    assert bench.events == []
    assert (state_of(trial), trial.run_id, trial.restarts) == (State.ACTIVE, 2, 0)
    assert len(bench.started) == 2


def test_a_pause_before_the_rendezvous_kills() -> None:
    bench = Bench()
    bench.post(create(A), validate_after(A, 5))
    bench.experiment.change_state(State.PAUSED, "user")
    bench.drive()
    assert bench.killed == bench.started
    trial = bench.experiment.trials[A]
    bench.exits(trial, 137)
    assert (state_of(trial), trial.restarts) == (State.PAUSED, 0)


def test_who_does_not_leave_a_paused_experiment_is_killed_in_the_end() -> None:
    bench = Bench(preemption_timeout_s=60)
    trial = bench.create()
    bench.experiment.change_state(State.PAUSED, "user")
    bench.drive()
    [timer] = bench.timers
    assert timer.delay_s == 60
    timer.call()
    bench.drive()
    assert bench.killed == [trial.allocation]


def test_operations_are_taken_while_paused() -> None:
    bench = Bench()
    bench.experiment.change_state(State.PAUSED, "user")
    bench.post(create(A), validate_after(A, 5))
    assert not bench.started
    bench.experiment.change_state(State.ACTIVE, "user")
    bench.drive()
    assert len(bench.started) == 1


@pytest.mark.parametrize(
    ("how", "kills"), [(State.STOPPING_CANCELED, False), (State.STOPPING_KILLED, True)]
)
def test_an_experiment_that_is_stopped_from_outside(how: State, kills: bool) -> None:
    bench = Bench()
    trial = bench.create()
    bench.experiment.change_state(how, "user")
    bench.drive()
    assert bench.killed == ([trial.allocation] if kills else [])
    assert trial.allocation is not None
    assert trial.allocation.preempt is not kills
    assert bench.events == ["experimentInactive"]
    bench.exits(trial, 137 if kills else 0, acknowledged=not kills)
    assert bench.experiment.state is State.CANCELED
    [inactive] = bench.experiment.events()
    assert inactive["experimentInactive"] == {"experimentState": "STATE_CANCELED"}
    with pytest.raises(ApiError, match="not found"):
        bench.cluster.running_experiment(bench.experiment.id)


# The end of an experiment.


@pytest.mark.parametrize(
    ("how", "end"),
    [({}, State.COMPLETED), ({"cancel": True}, State.CANCELED), ({"failure": True}, State.ERROR)],
)
def test_a_shutdown_waits_for_the_trials(how: dict[str, bool], end: State) -> None:
    bench = Bench()
    trial = bench.create()
    bench.report(trial)
    bench.post(shut_down(**how))
    assert bench.experiment.state.is_stopping
    bench.exits(trial, acknowledged=True)
    assert bench.experiment.state is end


def test_operations_of_an_experiment_that_stops_are_ignored() -> None:
    bench = Bench()
    trial = bench.create()
    bench.experiment.report_progress(trial, 1)
    bench.post(shut_down(), create(B))
    assert B not in bench.experiment.trials or bench.experiment.trials[B].allocation is None
    bench.exits(trial, acknowledged=True)
    bench.post(create(C))
    assert C not in bench.experiment.all_trials


def test_a_custom_searcher_never_shuts_down_by_itself() -> None:
    bench = Bench()
    bench.exits(bench.create(), 1)
    assert bench.experiment.state is State.ACTIVE


@pytest.mark.parametrize(("code", "end"), [(0, State.COMPLETED), (1, State.ERROR)])
def test_a_single_trial_ends_its_experiment(code: int, end: State) -> None:
    bench = Bench(SINGLE)
    [trial] = bench.experiment.trials.values()
    assert trial.hparams == {"lr": 0.1}
    assert trial.searcher.length == 10
    bench.exits(trial, code)
    assert bench.experiment.state is end


def test_a_killed_single_trial_cancels_its_experiment() -> None:
    bench = Bench(SINGLE)
    [trial] = bench.experiment.trials.values()
    bench.cluster.kill_trial(trial.id)
    bench.exits(trial, 137)
    assert bench.experiment.state is State.CANCELED


@pytest.mark.parametrize(
    ("storage", "kept"),
    [
        ({}, {"b", "d"}),
        ({"save_trial_best": 0}, {"d"}),
        ({"save_trial_best": 0, "save_trial_latest": 2}, {"c", "d"}),
        ({"save_trial_best": 0, "save_trial_latest": 0, "save_experiment_best": 2}, {"b", "c"}),
    ],
)
def test_the_end_deletes_checkpoints_that_are_not_to_be_kept(
    storage: dict[str, int], kept: set[str]
) -> None:
    bench = Bench(SINGLE)
    bench.experiment.config["checkpoint_storage"].update(storage)
    [trial] = bench.experiment.trials.values()
    for steps, (uuid, loss) in enumerate({"a": 3.0, "b": 1.0, "c": 2.0, "d": None}.items()):
        bench.cluster.report_checkpoint(
            {
                "uuid": uuid,
                "taskId": trial.task_id,
                "state": "STATE_COMPLETED",
                "metadata": {"steps_completed": steps},
            }
        )
        if loss is not None:
            report = {"stepsCompleted": steps, "metrics": {"avgMetrics": {"loss": loss}}}
            bench.cluster.report_metrics(trial, "validation", report)
    bench.exits(trial)
    assert {each["uuid"] for each in bench.cluster.checkpoints_of(trial)} == kept
    assert bench.deleted == [f"/checkpoints/{uuid}" for uuid in "abcd" if uuid not in kept]


# Several containers.


def test_nodes_that_only_run_sshd_are_killed_when_the_chief_is_done() -> None:
    bench = Bench(nodes=(1, 1), slots=2)
    trial = bench.create()
    allocation = trial.allocation
    assert allocation is not None
    chief, other = allocation.containers
    allocation.set_daemon(other.resources_id)
    allocation.acknowledge()
    allocation.container_exited(chief.resources_id, 0)
    bench.drive()
    assert bench.killed == [allocation]
    allocation.container_exited(other.resources_id, 137)
    assert (trial.restarts, trial.run_id) == (0, 2)


def test_a_failed_container_takes_the_others_along() -> None:
    bench = Bench(nodes=(1, 1), slots=2)
    trial = bench.create()
    allocation = trial.allocation
    assert allocation is not None
    allocation.container_exited(allocation.containers[1].resources_id, 9)
    bench.drive()
    assert bench.killed == [allocation]
    allocation.container_exited(allocation.containers[0].resources_id, 137)
    assert state_of(trial) is State.ERROR
    assert "exit code 9" in bench.cluster.logs[trial.task_id][-1].log


# Configurations.


def test_constants_say_that_they_are() -> None:
    user = {
        "lr": 0.1,
        "nested": {"list": [1, 2]},
        "depth": {"type": "int", "minval": 1, "maxval": 1},
    }
    full = normalized(user)
    assert full["lr"] == {"type": "const", "val": 0.1}
    assert full["nested"] == {"list": {"type": "const", "val": [1, 2]}}
    assert sample(full, seed=0) == {"lr": 0.1, "nested": {"list": [1, 2]}, "depth": 1}


@pytest.mark.parametrize(
    "config",
    [
        {"searcher": CUSTOM},
        {"entrypoint": "x"},
        {"entrypoint": "x", "searcher": {"name": "single", "metric": "loss"}},
        {"entrypoint": "x", "searcher": {"name": "annealing", "metric": "loss"}},
        [],
    ],
)
def test_wrong_configurations_are_refused(config: Any) -> None:
    with pytest.raises(ApiError, match="invalid experiment configuration") as error:
        Cluster().create_experiment(yaml.safe_dump(config), b"", "tester")
    assert error.value.status == 400


def test_projects_that_do_not_exist_are_refused() -> None:
    cluster = Cluster(projects=[("team", "llm")])
    config = {"entrypoint": "x", "searcher": CUSTOM, "workspace": "team", "project": "llm"}
    cluster.create_experiment(yaml.safe_dump(config), b"", "tester")
    with pytest.raises(ApiError, match="not found"):
        cluster.create_experiment(yaml.safe_dump({**config, "project": "x"}), b"", "tester")
