"""The stand-in that tests use: a running master, with methods to inspect and to disturb it."""

from __future__ import annotations

import io
import json
import os
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from dsat.determined_cluster.job import RUNNER_MODULE
from testing.master.accounts import Accounts
from testing.master.allocation import Allocation
from testing.master.cluster import Cluster
from testing.master.experiment import Experiment
from testing.master.logs import LogLine
from testing.master.made_up import MadeUpTrials
from testing.master.processes import Processes
from testing.master.requests import Master
from testing.master.server import Fault, HttpServer, Seen
from testing.master.trial import Trial

Json = dict[str, Any]
USERS = {"tester": "Standin-Passw0rd"}  # passwords by name


class StandIn:
    """A Determined master on a free port of loopback, with one agent per node.

    A context manager: leaving it kills all containers.

    Args:
        folder: For containers and checkpoints.
        nodes: The number of (CPU) slots of every agent.
        version: The version that it reports.
        poll_s: How long a long poll without news lasts; the real master's is 60 s.
        environment: Variables that every container has, as an image sets them.
        projects: Pairs of a workspace and a project in it.
        made_up: Trials without processes. The search runner is then run in a fork with fast time.
        idle: No container starts.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: Sequence[int] = (1,),
        version: str = "0.37.0",
        poll_s: float = 2.0,
        environment: Mapping[str, str] | None = None,
        projects: Sequence[tuple[str, str]] = (),
        made_up: MadeUpTrials | None = None,
        idle: bool = False,
    ) -> None:
        self.folder = folder
        self.users = dict(USERS)
        checkpoints = self.folder / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        self.cluster = Cluster(self, nodes, str(checkpoints), projects)
        self.accounts = Accounts(self.users)
        self._environment = dict(environment or {})
        self._timers: list[threading.Timer] = []
        self.made_up = made_up
        self.cluster.idle = idle
        self._master = Master(self.cluster, self.accounts, version, poll_s, made_up)
        self._processes = Processes(
            self.folder / "containers", self._logged, self._exited, self.cluster.now
        )
        self.http = HttpServer(self._master)

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.stop()
        for timer in self._timers:
            timer.cancel()
        self._processes.kill_all()

    # Address and users.

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.port}"

    def client_environment(self, home: Path) -> dict[str, str]:
        """Return the variables with which a user's command reaches the master.

        Args:
            home: Folder for the client's cached tokens.
        """
        [(name, password)] = self.users.items()
        found = {"DET_MASTER": self.url, "DET_USER": name, "DET_PASS": password}
        return {**found, "DET_DEBUG_CONFIG_PATH": str(home)}

    # Inspect what happened.

    def experiment(self, experiment_id: int) -> Experiment:
        with self._master.changed:
            return self.cluster.experiment(experiment_id)

    @property
    def experiments(self) -> list[Experiment]:
        with self._master.changed:
            return list(self.cluster.experiments.values())

    def trials(self, experiment_id: int) -> list[Trial]:
        """Return all trials of an experiment, sorted by id."""
        with self._master.changed:
            trials = self.cluster.experiment(experiment_id).all_trials.values()
            return sorted(trials, key=lambda trial: trial.id)

    def log(self, trial_id: int) -> str:
        """Return the whole log of a trial, as the client prints it; empty if there is no such
        trial."""
        with self._master.changed:
            tasks = [each.task_id for each in self.cluster.all_trials() if each.id == trial_id]
            lines = [line for task_id in tasks for line in self.cluster.logs.get(task_id, [])]
            return "".join(line.message for line in lines)

    def metrics(self, trial_id: int) -> list[Json]:
        """Return the validation metrics that a trial reported, oldest first."""
        with self._master.changed:
            reports = self.cluster.metrics.get(trial_id, [])
            return [each["metrics"] for each in reports if each["group"] == "validation"]

    def checkpoint_paths(self, trial_id: int) -> list[Path]:
        """Return the folders of a trial's checkpoints, oldest first."""
        with self._master.changed:
            checkpoints = self.cluster.checkpoints_of(self.cluster.trial(trial_id))
            return [self.cluster.checkpoint_path(each) for each in checkpoints]

    def context(self, experiment_id: int) -> dict[str, str]:
        """Return the uploaded files: text by path."""
        model_def = self.experiment(experiment_id).model_def
        with tarfile.open(fileobj=io.BytesIO(model_def), mode="r:gz") as archive:
            files = {each.name: archive.extractfile(each) for each in archive if each.isfile()}
            return {
                name: file.read().decode(errors="replace") for name, file in files.items() if file
            }

    def posted(self, experiment_id: int) -> list[Json]:
        """Return every accepted POST of searcher operations."""
        with self._master.changed:
            return list(self.cluster.experiment(experiment_id).posted)

    @property
    def seen(self) -> list[Seen]:
        return list(self.http.seen)

    def wait_until(
        self,
        holds: Callable[[], Any],
        what: str = "what a test waits for",
        timeout_s: float = 600.0,
    ) -> Any:
        """Wait until `holds()` returns a true value, and return it; a time-out shows the trials'
        logs."""
        deadline = time.monotonic() + timeout_s
        while not (value := holds()):
            if time.monotonic() > deadline:
                logs = "".join(
                    f"--- trial {trial.id} of experiment {trial.experiment_id}: {trial.state}\n"
                    f"{self.log(trial.id)}"
                    for trial in self.cluster.all_trials()
                )
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{logs}")
            time.sleep(0.02)
        return value

    def wait_ended(self, experiment_id: int) -> str:
        """Wait for the end of an experiment; return its terminal state."""
        experiment = self.experiment(experiment_id)

        def ended() -> bool:
            # With the lock, the consequences of the end have happened too.
            with self._master.changed:
                return experiment.state.is_terminal

        self.wait_until(ended, f"the end of experiment {experiment_id}")
        return str(experiment.state)

    # Disturb it.

    def fault(self, pattern: str, **more: Any) -> Fault:
        """Put a fault in force; see `Fault`."""
        fault = Fault(pattern, **more)
        self.http.faults.append(fault)
        return fault

    def processes(self, trial_id: int) -> list[psutil.Process]:
        """Return all living processes of a trial's container."""
        allocation = self.cluster.trial(trial_id).allocation
        return [] if allocation is None else self._processes.of(allocation.id)

    def redeliver(self, experiment_id: int, *events: Json) -> None:
        """Put events before those of the next answer: acknowledged ones, or ones that no master
        sends."""
        with self._master.changed:
            self._master.redelivered.setdefault(experiment_id, []).extend(events)

    def preempt(self, trial_id: int) -> None:
        """Preempt a trial; it gets slots again after it has released these."""
        allocation = self.cluster.trial(trial_id).allocation
        assert allocation is not None
        self.do(lambda: allocation.terminate("preempted by the scheduler"))

    # Methods that the cluster calls.

    def start_container(self, allocation: Allocation) -> None:
        trial = self.cluster.trial_of_task(allocation.task_id)
        entrypoint = self.cluster.experiments[trial.experiment_id].config["entrypoint"]
        if self.made_up is None:
            self._processes.start(allocation, self._variables(trial, allocation), None)
        elif RUNNER_MODULE in entrypoint:
            self._processes.start(allocation, self._variables(trial, allocation), entrypoint)
        else:
            self.made_up.start(trial, allocation)

    def kill_container(self, allocation: Allocation) -> None:
        self._processes.kill(allocation.id)

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, self.do, (call,))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def do(self, call: Callable[[], object]) -> None:
        with self._master.changed:
            call()
            self._master.drive()

    def _logged(self, task_id: str, line: LogLine) -> None:
        with self._master.changed:
            self.cluster.logs.setdefault(task_id, []).append(line)
            self._master.changed.notify_all()

    def _exited(self, allocation: Allocation, exit_code: int) -> None:
        self.do(lambda: allocation.container_exited(exit_code))

    def _variables(self, trial: Trial, allocation: Allocation) -> dict[str, str]:
        experiment = self.cluster.experiments[trial.experiment_id]
        checkpoint = self.cluster.latest_checkpoint(trial)
        steps = checkpoint["metadata"].get("steps_completed", 0) if checkpoint else 0
        storage = experiment.config["checkpoint_storage"]
        return {
            **self._environment,
            "DET_MASTER": self.url,
            "DET_MASTER_HOST": "127.0.0.1",
            "DET_MASTER_ADDR": "127.0.0.1",
            "DET_MASTER_PORT": str(self.http.port),
            "DET_CLUSTER_ID": self.cluster.id,
            "DET_TASK_ID": allocation.task_id,
            "DET_TASK_TYPE": "TRIAL",
            "DET_ALLOCATION_ID": allocation.id,
            "DET_SESSION_TOKEN": self.accounts.task_session(experiment.owner),
            "DET_USER": experiment.owner,
            "DET_USER_TOKEN": self.accounts.session(experiment.owner),
            "DET_EXPERIMENT_ID": str(trial.experiment_id),
            "DET_EXPERIMENT_CONFIG": json.dumps(experiment.config),
            "DET_TRIAL_ID": str(trial.id),
            "DET_TRIAL_RUN_ID": str(trial.run_id),
            "DET_TRIAL_SEED": str(trial.seed),
            "DET_HPARAMS": json.dumps(trial.hparams),
            "DET_STEPS_COMPLETED": str(steps),
            **({"DET_LATEST_CHECKPOINT": checkpoint["uuid"]} if checkpoint else {}),
            # Read by `container/sitecustomize.py`.
            "HOSTNAME_CONTAINER_SHARED_FS": storage.get("host_path") or "",
            "HOSTNAME_CONTAINER_GRACE_S": "0.2",
            **_user_variables(experiment.config),
        }


def _user_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the `environment.environment_variables` of a configuration.

    They are a list of `NAME=VALUE`, or one such list for each slot type.
    """
    listed = config["environment"].get("environment_variables") or []
    if isinstance(listed, Mapping):
        listed = listed.get("cpu") or []
    pairs = (entry.partition("=") for entry in listed)
    return {name: value if equals else os.environ.get(name, "") for name, equals, value in pairs}
