"""Trials on the cluster: operations that start and end them, and outcomes from the master's events.

The caller passes the master's events to the engine and posts the operations that it returns. The
engine itself requests only logs of trials.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsat.command import ds_config, script_args
from dsat.command.experiment import length_in_units, trial_hparams
from dsat.determined_cluster import trial_result
from dsat.determined_cluster.job import VARIED, Job, varied_values
from dsat.in_trial import cluster_rank
from dsat.in_trial.meter_spec import MeterSpec
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial

# An instruction to the master in its JSON form: one of these keys, with arguments.
Operation = dict[str, Any]
CREATE, VALIDATE, CLOSE, SHUTDOWN = "createTrial", "trialOperation", "closeTrial", "shutDown"
# Events about trials that may have ended.
COMPLETED, EXITED, CLOSED = "validationCompleted", "trialExitedEarly", "trialClosed"
_BY_USER = ("EXITED_REASON_USER_CANCELED", "EXITED_REASON_USER_REQUESTED_STOP")
_TIMEOUT = (
    "no result within the time limit, which begins when the trial gets its slots. If the script "
    "loads for long but does not hang, raise --trial-timeout"
)


class ClusterEngine:
    """Engine that makes operations of a custom searcher, and outcomes from the master's events.

    Args:
        runner_id: experiment of the search runner; part of the trials' request ids.
        read_log: function that returns the log of a trial, given by its number in the search.
    """

    def __init__(self, job: Job, runner_id: int, read_log: Callable[[int], Sequence[str]]) -> None:
        self._job = job
        self._runner_id = runner_id
        self._read_log = read_log
        self._running: dict[int, float] = {}  # launch times
        self._trial_by_request: dict[str, int] = {}
        self._overdue = set[int]()
        self._device_name = ""  # of the first trial that reported one

    @property
    def free_slots(self) -> int:
        return self._job.num_slots - len(self._running) * self._job.plan.slots_per_trial

    def launch(self, trial: Trial) -> list[Operation]:
        """Return the operations that start a trial; the caller has checked `free_slots`."""
        self.adopt(trial)
        plan = self._job.plan
        meter = MeterSpec.build(trial, self._job.trial, slots=plan.slots_per_trial)
        flags = script_args.expected_flags(plan.base_config, plan.own_batch.config())
        hparams = {
            **trial_hparams(self._job.hparams, trial.overrides, trial.script_args),
            VARIED: varied_values(trial),
            ds_config.DSAT_MODE_KEY: True,
            ds_config.DSAT_TRIAL_KEY: cluster_rank.spec_for_hparams(
                meter, trial.id, self._runner_id, flags
            ),
        }
        # Longer than the trial needs: the trial ends by itself.
        length = length_in_units(meter.longest, self._job.config, trial.batch)
        request = {"requestId": self._request_id(trial.id)}
        return [
            {CREATE: {**request, "hyperparams": json.dumps(hparams)}},
            {VALIDATE: {"validateAfter": {**request, "length": str(length)}}},
        ]

    def adopt(self, trial: Trial, outcome: Outcome | None = None) -> None:
        """Register a trial as running, or as ended if it has an outcome from an earlier process."""
        self._trial_by_request[self._request_id(trial.id)] = trial.id
        if outcome is None:
            self._running[trial.id] = time.monotonic()
        else:
            self._comparable(outcome)

    def time_out(self, trial_id: int) -> bool:
        """Count the end of a trial as a timeout; return False if the trial has ended already."""
        is_running = trial_id in self._running
        self._overdue |= {trial_id} if is_running else set()
        return is_running

    def end(self, event: Mapping[str, Any]) -> tuple[int, Outcome, list[Operation]] | None:
        """If an event ends a trial, return its id, outcome and operations to post; else None."""
        kind = next((key for key in (COMPLETED, EXITED, CLOSED) if event.get(key)), None)
        if kind is None:
            return None
        data = event[kind]
        trial_id = self._trial_by_request.get(data["requestId"])
        if trial_id not in self._running:
            return None
        operations: list[Operation] = []
        if kind == COMPLETED:  # unless it is closed, the trial continues
            outcome = trial_result.from_metric(data["metric"])
            operations = [{CLOSE: {"requestId": data["requestId"]}}]
        elif trial_id in self._overdue:
            outcome = Outcome(OutcomeKind.TIMEOUT, message=_TIMEOUT)
        elif kind == EXITED and data["exitedReason"] in _BY_USER:
            outcome = Outcome(OutcomeKind.CANCELED, message="by a user of the cluster")
        else:
            outcome = trial_result.from_log(self._read_log(trial_id), failed=kind == EXITED)
        since_s = max(time.monotonic() - self._running.pop(trial_id), 0.001)
        if not outcome.duration_s:  # else the trial measured it
            outcome = replace(outcome, duration_s=round(since_s, 3))
        outcome = replace(outcome, batch_flag="")  # arguments of trials cannot be changed here
        return trial_id, self._comparable(outcome), operations

    def _request_id(self, trial_id: int) -> str:
        """Return a trial's request id, the same in every process of a search."""
        key = f"dsat:{self._runner_id}:{self._job.plan.seed}:{trial_id}"
        return str(uuid.uuid5(uuid.NAMESPACE_URL, key))

    def _comparable(self, outcome: Outcome) -> Outcome:
        """Return the outcome, or INVALID if the trial's kind of device differs from the first's."""
        device, first = outcome.device_name, self._device_name or outcome.device_name
        self._device_name = first
        if device in ("", first):
            return outcome
        return Outcome(
            OutcomeKind.INVALID,
            message=f"it ran on {device}, but earlier trials ran on {first}, so they cannot be "
            "compared. In resources.resource_pool, name a pool with one kind of device",
            duration_s=outcome.duration_s,
        )
