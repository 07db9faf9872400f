"""The engine over searcher events keeps the contract of every engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsat.determined_cluster.engine import ClusterEngine
from dsat.determined_cluster.job import Job
from dsat.determined_cluster.master import RemoteCluster
from dsat.engines import Engine
from dsat.values.outcome import Outcome
from dsat.values.trial import TrialOptions
from testing.engine_contract import Behaviour, EngineContract
from testing.helpers import plan_of, ran
from testing.master import StandIn
from testing.master.made_up import Ending, MadeUpTrials
from testing.on_cluster import reported


def behave(hparams: Mapping[str, Any]) -> Ending | None:
    behaviour = hparams["overwrite_deepspeed_args"]["behaviour"]
    if behaviour == Behaviour.HANGS:
        return None
    if behaviour == Behaviour.EXHAUSTS_MEMORY:
        return Ending(log=("torch.OutOfMemoryError: CUDA out of memory.",), status=1)
    return Ending(log=("ValueError",), status=1) if behaviour == Behaviour.CRASHES else END


END = reported(ran())


class ConnectedEngine(ClusterEngine, RemoteCluster):
    """The engine of an experiment; asking it for news lets time pass on the cluster."""

    def __init__(self, master: StandIn, num_slots: int, slots_per_trial: int) -> None:
        plan = plan_of(slots_per_trial=slots_per_trial)
        trial, at_once = TrialOptions(timeout_s=600.0), num_slots // slots_per_trial
        hparams = {"deepspeed_config": "ds.json"}
        ClusterEngine.__init__(self, Job(plan, {}, {}, hparams, trial, at_once), 1, self)
        self.there = master
        config: dict[str, Any] = {"entrypoint": "x", "searcher": {"name": "custom", "metric": "x"}}
        config["max_restarts"] = 0
        self.experiment = master.cluster.create_experiment(json.dumps(config), b"", "tester")

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        self._exchange()
        if timeout_s and self.there.made_up is not None:
            made_up, cluster = self.there.made_up, self.there.cluster
            self.there.do(lambda: made_up.let_one_end(cluster))
            self._exchange()
        return super().poll(timeout_s)

    def _exchange(self) -> None:
        """Take operations to the experiment, and its events to the engine, until there are none."""
        queue = self.experiment.queue.events
        operations = self.take_operations()
        while operations or queue:
            posted = list(operations)
            self.there.do(lambda: self.experiment.process(posted))  # noqa: B023
            for event in [queue.pop(0) for _ in range(len(queue))]:
                if news := event.get("validationCompleted"):
                    self.validated(news["requestId"], news["metric"])
                elif news := event.get("trialExitedEarly"):
                    canceled = news["exitedReason"] == "EXITED_REASON_USER_CANCELED"
                    self.exited(news["requestId"], canceled=canceled)
                elif news := event.get("trialClosed"):
                    self.closed(news["requestId"])
            operations = self.take_operations()

    # -- what the engine asks of the cluster

    def log(self, trial_id: int) -> Sequence[str]:
        return self.there.log(self._trial(trial_id).id).splitlines(keepends=True)

    def kill(self, trial_id: int) -> None:
        self.there.do(lambda: self.there.cluster.kill_trial(self._trial(trial_id).id))

    def _trial(self, trial_id: int) -> Any:
        return self.experiment.all_trials[self.request_id(trial_id)]


class TestClusterEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def _master(self, tmp_path: Path) -> Any:
        with StandIn(tmp_path, nodes=(8,), made_up=MadeUpTrials(behave)) as self.master:
            yield

    def make(self, num_slots: int) -> Engine:
        return ConnectedEngine(self.master, num_slots, self.slots_per_trial)


class TestClusterEngineWithSeveralSlots(TestClusterEngine):
    slots_per_trial = 3
