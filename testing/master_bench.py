"""A cluster of the fake master without HTTP or processes: its effects are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from testing.master.allocation import Allocation
from testing.master.cluster import Cluster
from testing.master.effects import KillContainers, Later, StartContainers
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
