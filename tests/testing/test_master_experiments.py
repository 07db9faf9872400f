"""The fake master's experiments: users, ends, several containers, configurations."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from testing.master.cluster import Cluster
from testing.master.errors import ApiError
from testing.master.states import State
from testing.master_bench import (
    CUSTOM,
    SINGLE,
    A,
    B,
    Bench,
    create,
    shut_down,
    state_of,
    validate_after,
)


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
