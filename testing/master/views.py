"""The JSON of experiments, trials, checkpoints, metrics and logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from testing.master.cluster import Cluster
from testing.master.experiment import Experiment
from testing.master.logs import LogLine
from testing.master.states import State
from testing.master.trial import Trial

Json = dict[str, Any]


def experiment(cluster: Cluster, one: Experiment) -> Json:
    """v1Experiment."""
    trials = sorted(one.all_trials.values(), key=lambda trial: trial.id)
    config = one.config
    project_id = cluster.project_of(config)
    workspace, project = cluster.projects[project_id - 1]
    return {
        "id": one.id,
        "description": config["description"],
        "labels": config["labels"],
        "startTime": one.start_time,
        "endTime": one.end_time,
        "state": _experiment_state(one),
        "archived": False,
        "numTrials": len(trials),
        "trialIds": [trial.id for trial in trials],
        "username": one.owner,
        "resourcePool": config["resources"]["resource_pool"],
        "searcherType": config["searcher"]["name"],
        "searcherMetric": config["searcher"]["metric"],
        "hyperparameters": config["hyperparameters"],
        "name": config["name"],
        "jobId": one.job_id,
        "progress": one.progress,
        "projectId": project_id,
        "projectName": project,
        "workspaceId": project_id,
        "workspaceName": workspace,
        "config": config,
        "originalConfig": one.original_config,
        "projectOwnerId": 1,
    }


def trial(cluster: Cluster, one: Trial) -> Json:
    """trialv1Trial."""
    metrics = cluster.metrics.get(one.id, [])
    validations = [each for each in metrics if each["group"] == "validation"]
    owner = cluster.experiments[one.experiment_id]
    return {
        "id": one.id,
        "experimentId": one.experiment_id,
        "startTime": owner.start_time,
        "endTime": owner.end_time if one.state.is_terminal else None,
        "state": _trial_state(one),
        "restarts": one.restarts,
        "hparams": one.hparams,
        "totalBatchesProcessed": max((each["steps"] for each in metrics), default=0),
        "latestValidation": _workload(validations[-1]) if validations else None,
        "runnerState": one.runner_state,
        "wallClockTime": cluster.on_slots_s(one),
        "taskId": one.task_id,
        "taskIds": [one.task_id],
    }


def checkpoint(cluster: Cluster, one: Mapping[str, Any]) -> Json:
    """v1Checkpoint with its trial."""
    of_trial = cluster.trial_of_task(one["taskId"])
    steps = one["metadata"].get("steps_completed")
    reports = [
        each
        for each in cluster.metrics.get(of_trial.id, [])
        if each["group"] == "validation" and each["steps"] == steps
    ]
    return {
        "taskId": one["taskId"],
        "allocationId": one.get("allocationId"),
        "uuid": one["uuid"],
        "reportTime": one.get("reportTime"),
        "resources": {name: str(size) for name, size in one["resources"].items()},
        "metadata": one["metadata"],
        "state": one["state"],
        "storageId": one.get("storageId"),
        "training": {
            "trialId": of_trial.id,
            "experimentId": of_trial.experiment_id,
            "experimentConfig": cluster.experiments[of_trial.experiment_id].config,
            "hparams": of_trial.hparams,
            "trainingMetrics": {"avgMetrics": {}, "batchMetrics": []},
            "validationMetrics": {
                "avgMetrics": reports[-1]["metrics"] if reports else {},
                "batchMetrics": [],
            },
            "searcherMetric": None,
        },
    }


def user(name: str) -> Json:
    """v1User."""
    flags = {"admin": False, "active": True, "remote": False}
    modified = {"modifiedAt": "2024-01-01T00:00:00Z"}
    return {
        "id": 2,
        "username": name,
        "agentUserGroup": None,
        "displayName": "",
        **flags,
        **modified,
    }


def trial_log(number: int, trial_id: int, line: LogLine) -> Json:
    """v1TrialLogsResponse."""
    return {
        "id": str(number),
        "trialId": trial_id,
        "timestamp": line.timestamp,
        "message": line.message,
        "level": f"LOG_LEVEL_{line.level}" if line.level else "LOG_LEVEL_UNSPECIFIED",
        "agentId": line.agent_id,
        "containerId": line.container_id,
        "rankId": line.rank,
        "log": line.log,
        "source": line.source,
        "stdtype": line.stdtype,
    }


def page(name: str, rows: Sequence[Json], offset: int, limit: int) -> Json:
    """A part of a list, with its pagination."""
    end = len(rows) if limit <= 0 else min(len(rows), offset + limit)
    return {
        name: list(rows[offset:end]),
        "pagination": {
            "offset": offset,
            "limit": limit,
            "startIndex": min(offset, end),
            "endIndex": end,
            "total": len(rows),
        },
    }


def _experiment_state(one: Experiment) -> str:
    if one.state is not State.ACTIVE:
        return str(one.state)
    return _enriched(one.trials.values())


def _trial_state(one: Trial) -> str:
    return _enriched([one]) if one.state is State.ACTIVE else str(one.state)


def _enriched(trials: Iterable[Trial]) -> str:
    """Return the state that the API shows for ACTIVE."""
    if any(trial.allocation is not None and trial.allocation.started for trial in trials):
        return "STATE_RUNNING"
    return "STATE_QUEUED"


def _workload(report: Mapping[str, Any]) -> Json:
    return {
        "endTime": report["time"],
        "state": "STATE_COMPLETED",
        "metrics": {"avgMetrics": report["metrics"], "batchMetrics": []},
        "numInputs": 0,
        "totalBatches": report["steps"],
    }
