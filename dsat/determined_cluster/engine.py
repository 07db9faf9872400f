"""Engine over a stream of searcher events: events go in, operations come out.

It has no connection of its own: the caller passes in the events (`validated`, `exited`, `closed`)
and posts the operations. It asks the master only for a trial's log.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dsat.command import ds_config
from dsat.command.experiment import length_in_units, trial_hparams
from dsat.determined_cluster import trial_result
from dsat.determined_cluster.job import VARIED, Job, varied_values
from dsat.errors import EngineError
from dsat.in_trial import cluster_rank
from dsat.in_trial.meter_spec import MeterSpec
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial

# An instruction to the master, as its JSON: one of these keys, and its arguments.
Operation = dict[str, Any]
CREATE, VALIDATE, CLOSE, SHUTDOWN = "createTrial", "trialOperation", "closeTrial", "shutDown"


class ClusterEngine:
    """Runs trials by operations of a custom searcher.

    Args:
        runner_id: experiment of the search runner; request ids derive from it and the seed.
        read_log: returns the log of a trial, by its number in the search.
    """

    def __init__(
        self,
        job: Job,
        runner_id: int,
        read_log: Callable[[int], Sequence[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._runner_id = runner_id
        self._read_log = read_log
        self._clock = clock
        self._known: set[int] = set()
        self._running: dict[int, float] = {}  # launch times
        self._trial_by_request: dict[str, int] = {}
        self._ended: list[tuple[int, Outcome]] = []
        self._operations: list[Operation] = []
        self._closed = False
        self._device_name = ""  # of the first trial that told it

    # -- the interface of every engine, without canceling, which users do in the web UI

    @property
    def num_slots(self) -> int:
        return self._job.num_slots

    @property
    def free_slots(self) -> int:
        return self.num_slots - len(self._running) * self._job.plan.slots_per_trial

    def launch(self, trial: Trial) -> None:
        if trial.id in self._known:
            return
        if self.free_slots < self._job.plan.slots_per_trial:
            raise EngineError(f"no free slots for trial {trial.id}")
        self.adopt(trial)
        meter = MeterSpec.build(trial, self._job.trial, slots=self._job.plan.slots_per_trial)
        hparams = {
            **trial_hparams(self._job.hparams, trial.overrides, trial.script_args),
            VARIED: varied_values(trial),
            ds_config.DSAT_MODE_KEY: True,
            ds_config.DSAT_TRIAL_KEY: cluster_rank.spec_for_hparams(
                meter, trial.id, self._runner_id
            ),
        }
        # More than the trial needs, as it ends by itself.
        length = length_in_units(meter.longest, self._job.config, trial.batch)
        request = {"requestId": self.request_id(trial.id)}
        self._operations += [
            {CREATE: {**request, "hyperparams": json.dumps(hparams)}},
            {VALIDATE: {"validateAfter": {**request, "length": str(length)}}},
        ]

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        """Return the trials that ended since the last call; does not wait."""
        ended, self._ended = self._ended, []
        return [] if self._closed else ended

    def close(self, *, failure: bool = False) -> None:
        if not self._closed:
            self._closed = True
            self._operations.append({SHUTDOWN: {"cancel": False, "failure": failure}})

    # -- towards the master

    def take_operations(self) -> list[Operation]:
        """Return new operations to post, in order."""
        operations, self._operations = self._operations, []
        return operations

    def request_id(self, trial_id: int) -> str:
        """Return a trial's request id, the same in every process of a search."""
        key = f"dsat:{self._runner_id}:{self._job.plan.seed}:{trial_id}"
        return str(uuid.uuid5(uuid.NAMESPACE_URL, key))

    # -- events

    def adopt(self, trial: Trial, outcome: Outcome | None = None) -> None:
        """Register a trial that an earlier process launched."""
        self._known.add(trial.id)
        self._trial_by_request[self.request_id(trial.id)] = trial.id
        if outcome is None:
            self._running[trial.id] = self._clock()
        else:
            self._comparable(outcome)

    def validated(self, request_id: str, metric: Any) -> None:
        """Close a trial that completed its operation, because it would go on."""
        trial_id = self._running_trial(request_id)
        if trial_id is not None:
            self._end(trial_id, trial_result.from_metric(metric))
            self._operations.append({CLOSE: {"requestId": request_id}})

    def exited(self, request_id: str, *, canceled: bool) -> None:
        """Record a trial that failed or was canceled; the master closes it."""
        trial_id = self._running_trial(request_id)
        if trial_id is None:
            return
        if canceled:
            self._end(trial_id, Outcome(OutcomeKind.CANCELED, message="by a user of the cluster"))
        else:
            self._end(trial_id, trial_result.from_log(self._read_log(trial_id), failed=True))

    def closed(self, request_id: str) -> None:
        """Record a trial that ended by itself, without a report."""
        trial_id = self._running_trial(request_id)
        if trial_id is not None:
            self._end(trial_id, trial_result.from_log(self._read_log(trial_id), failed=False))

    def _running_trial(self, request_id: str) -> int | None:
        trial_id = self._trial_by_request.get(request_id)
        return trial_id if trial_id in self._running else None

    def _end(self, trial_id: int, outcome: Outcome) -> None:
        since_s = max(self._clock() - self._running.pop(trial_id), 0.001)
        if not outcome.duration_s:  # else the trial measured it
            outcome = replace(outcome, duration_s=round(since_s, 3))
        outcome = replace(outcome, batch_flag="")  # arguments of trials cannot be changed here
        self._ended.append((trial_id, self._comparable(outcome)))

    def _comparable(self, outcome: Outcome) -> Outcome:
        """Return an outcome, INVALID if it is from another kind of device than the first."""
        device, first = outcome.device_name, self._device_name or outcome.device_name
        self._device_name = first
        if device in ("", first):
            return outcome
        return Outcome(
            OutcomeKind.INVALID,
            message=f"it ran on {device}, earlier trials on {first}, and these cannot be compared. "
            "Name a pool of one kind of device in resources.resource_pool",
            duration_s=outcome.duration_s,
        )
