"""The master's state: slots, experiments, trials, metrics, checkpoints, logs.

Not thread safe; the server holds a lock around every call.
"""

from __future__ import annotations

import datetime
import itertools
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testing.master import config as configs
from testing.master.allocation import Allocation, Exit
from testing.master.errors import INTERNAL, ApiError, invalid, not_found
from testing.master.experiment import Experiment
from testing.master.logs import LogLine, parse
from testing.master.states import State
from testing.master.trial import INVALID_HP, Trial

if TYPE_CHECKING:
    from testing.master.standin import StandIn

Json = dict[str, Any]


class Cluster:
    """State of a master.

    A task gets all its slots on one node, in order of arrival among those that fit. Tasks without
    slots always run, on the first node.

    Args:
        world: Starts and kills containers.
        nodes: The number of slots of every agent.
        checkpoints: The folder for checkpoints of experiments that name none.
        projects: Pairs of a workspace and a project in it, in addition to the default pair.
    """

    def __init__(
        self,
        world: StandIn,
        nodes: Sequence[int],
        checkpoints: str,
        projects: Sequence[tuple[str, str]],
    ) -> None:
        self.id = str(uuid.uuid4())
        self.kill_container, self.later = world.kill_container, world.later
        self.experiments: dict[int, Experiment] = {}
        self.allocations: dict[str, Allocation] = {}
        self.metrics: dict[int, list[Json]] = {}
        self.checkpoints: dict[str, Json] = {}
        self.logs: dict[str, list[LogLine]] = {}
        self.projects = [("Uncategorized", "Uncategorized"), *projects]
        self.idle = False
        self._start_container = world.start_container
        self._nodes = nodes
        self._waiting: list[Allocation] = []
        self._checkpoint_folder = checkpoints
        self._trial_ids = itertools.count(1)

    # The methods that experiments, trials and allocations call.

    def now(self) -> str:
        return datetime.datetime.now(datetime.timezone.utc).isoformat().replace("+00:00", "Z")

    def new_trial_id(self) -> int:
        return next(self._trial_ids)

    def allocate(self, trial: Trial, on_exit: Callable[[Exit], None]) -> Allocation:
        resources = self.experiments[trial.experiment_id].config["resources"]
        allocation = Allocation(
            f"{trial.task_id}.{trial.run_id}",
            trial.task_id,
            f"Trial {trial.id} (Experiment {trial.experiment_id})",
            int(resources["slots_per_trial"]),
            self,
            on_exit,
        )
        self.allocations[allocation.id] = allocation
        self._waiting.append(allocation)
        return allocation

    def release(self, allocation: Allocation) -> None:
        if allocation in self._waiting:
            self._waiting.remove(allocation)

    def log(self, task_id: str, text: str, level: str = "INFO") -> None:
        line = LogLine(timestamp=self.now(), log=f"{text}\n", level=level, source="master")
        self.logs.setdefault(task_id, []).append(line)

    def print(self, allocation: Allocation, text: str) -> None:
        """Add a line that a container printed."""
        line = parse(
            f"{text}\n",
            timestamp=self.now(),
            container_id=allocation.container_id,
            agent_id=f"agent-{allocation.node}",
        )
        self.logs.setdefault(allocation.task_id, []).append(line)

    # The methods that requests call.

    def schedule(self) -> None:
        """Start the waiting allocations that fit."""
        if self.idle:
            return
        for allocation in list(self._waiting):
            for node, slots in enumerate(self._nodes):
                free = [slot for slot in range(slots) if (node, slot) not in self._taken()]
                if len(free) >= allocation.slots:
                    self._waiting.remove(allocation)
                    allocation.start(node, free[: allocation.slots])
                    self._start_container(allocation)
                    break

    def _taken(self) -> set[tuple[int, int]]:
        running = [each for each in self.allocations.values() if each.started and not each.ended]
        return {(each.node, slot) for each in running for slot in each.slot_ids}

    def create_experiment(
        self, config: str, model_def: bytes, owner: str, *, activate: bool = True
    ) -> Experiment:
        """Submit an experiment.

        Raises:
            ApiError: Its configuration is wrong, or it needs more slots than a node has.
        """
        full = configs.complete(config, self._checkpoint_folder)
        if int(full["resources"]["slots_per_trial"]) > max(self._nodes):
            raise ApiError(INTERNAL, "slots requested exceeds cluster capacity")
        self.project_of(full)
        experiment = Experiment(len(self.experiments) + 1, full, config, model_def, owner, self)
        self.experiments[experiment.id] = experiment
        if not activate:
            experiment.state = State.PAUSED
        experiment.start()
        return experiment

    def project_of(self, config: Json) -> int:
        """Return the id of the project that a configuration names."""
        default_workspace, default_project = self.projects[0]
        wanted = (config["workspace"] or default_workspace, config["project"] or default_project)
        if wanted not in self.projects:
            raise not_found(f"workspace '{wanted[0]}' or project '{wanted[1]}' not found")
        return self.projects.index(wanted) + 1

    def experiment(self, experiment_id: int) -> Experiment:
        if experiment_id not in self.experiments:
            raise not_found(f"experiment '{experiment_id}' not found")
        return self.experiments[experiment_id]

    def running_experiment(self, experiment_id: int) -> Experiment:
        """Return an experiment that has not ended; the master keeps only a record of others."""
        experiment = self.experiment(experiment_id)
        if experiment.state.is_terminal:
            raise not_found(f"experiment '{experiment_id}' not found")
        return experiment

    def all_trials(self) -> list[Trial]:
        every = [trial for each in self.experiments.values() for trial in each.all_trials.values()]
        return sorted(every, key=lambda trial: trial.id)

    def trial(self, trial_id: int) -> Trial:
        found = next((trial for trial in self.all_trials() if trial.id == trial_id), None)
        if found is None:
            raise not_found(f"trial '{trial_id}' not found")
        return found

    def trial_of_task(self, task_id: str) -> Trial:
        found = next((trial for trial in self.all_trials() if trial.task_id == task_id), None)
        if found is None:
            raise not_found(f"task '{task_id}' not found")
        return found

    def allocation(self, allocation_id: str) -> Allocation:
        """Return an allocation that has not ended."""
        allocation = self.allocations.get(allocation_id)
        if allocation is None or allocation.ended:
            raise not_found(f"allocation '{allocation_id}' not found")
        return allocation

    def kill_trial(self, trial_id: int) -> None:
        self.trial(trial_id).patch(State.STOPPING_KILLED, "user requested kill")

    def early_exit(self, trial_id: int, reason: str) -> None:
        trial = self.trial(trial_id)
        if reason != INVALID_HP:
            raise invalid(f"should not report special exit reason {reason} to the master")
        trial.report_invalid_hp()

    def report_metrics(self, trial: Trial, group: str, report: Json) -> None:
        self.metrics.setdefault(trial.id, []).append(
            {
                "group": group,
                "steps": int(report.get("stepsCompleted") or 0),
                "metrics": report["metrics"]["avgMetrics"],
            }
        )

    def report_checkpoint(self, checkpoint: Json) -> None:
        self.trial_of_task(checkpoint["taskId"])
        self.checkpoints[checkpoint["uuid"]] = dict(checkpoint)

    def checkpoints_of(self, trial: Trial) -> list[Json]:
        """Return a trial's checkpoints that were not deleted, oldest first."""
        return [
            checkpoint
            for checkpoint in self.checkpoints.values()
            if checkpoint["taskId"] == trial.task_id and checkpoint["state"] == "STATE_COMPLETED"
        ]

    def checkpoint_path(self, checkpoint: Json) -> Path:
        """Return the folder of a checkpoint on the cluster's file system."""
        trial = self.trial_of_task(checkpoint["taskId"])
        storage = self.experiments[trial.experiment_id].config["checkpoint_storage"]
        root = Path(storage.get("host_path") or storage["container_path"])
        return root / str(storage.get("storage_path", "")) / str(checkpoint["uuid"])

    def latest_checkpoint(self, trial: Trial) -> Json | None:
        """Return the checkpoint from which a restarted trial begins, if there is one."""
        found = self.checkpoints_of(trial)
        return found[-1] if found else None
