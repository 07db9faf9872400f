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
# The legacy names of the groups' averages.
_VALIDATION, _OTHERS = "validation_metrics", "avg_metrics"


def experiment(cluster: Cluster, one: Experiment) -> Json:
    """v1Experiment."""
    trials = sorted(one.all_trials.values(), key=lambda trial: trial.id)
    config = one.config
    project_id = cluster.project_of(config)
    workspace, project = cluster.projects[project_id - 1]
    checkpoints = [each for trial in trials for each in cluster.checkpoints_of(trial)]
    return {
        "id": one.id,
        "description": config["description"],
        "labels": config["labels"],
        "startTime": one.start_time,
        "endTime": one.end_time,
        "state": _experiment_state(one),
        "archived": one.archived,
        "numTrials": len(trials),
        "trialIds": [trial.id for trial in trials],
        "displayName": "",
        "userId": 2,
        "username": one.owner,
        "resourcePool": config["resources"]["resource_pool"],
        "searcherType": config["searcher"]["name"],
        "searcherMetric": config["searcher"]["metric"],
        "hyperparameters": config["hyperparameters"],
        "name": config["name"],
        "notes": one.notes,
        "jobId": one.job_id,
        "forkedFrom": None,
        "progress": one.progress,
        "projectId": project_id,
        "projectName": project,
        "workspaceId": project_id,
        "workspaceName": workspace,
        "parentArchived": False,
        "config": config,
        "originalConfig": one.original_config,
        "projectOwnerId": 1,
        "checkpointSize": str(sum(_size(each) for each in checkpoints)),
        "checkpointCount": len(checkpoints),
        **_best_trial(cluster, one, trials),
        "unmanaged": False,
        "duration": None,
        "modelDefinitionSize": len(one.model_def),
        "pachydermIntegration": None,
    }


def trial(cluster: Cluster, one: Trial) -> Json:
    """trialv1Trial."""
    metrics = cluster.metrics.get(one.id, [])
    validations = [each for each in metrics if each["group"] == "validation"]
    checkpoints = cluster.checkpoints_of(one)
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
        "bestValidation": None,
        "latestValidation": _workload(validations[-1]) if validations else None,
        "bestCheckpoint": None,
        "runnerState": one.runner_state,
        "wallClockTime": cluster.on_slots_s(one),
        "warmStartCheckpointUuid": "",
        "taskId": one.task_id,
        "taskIds": [one.task_id],
        "totalCheckpointSize": str(sum(map(_size, checkpoints))),
        "checkpointCount": len(checkpoints),
        "summaryMetrics": _summary(metrics),
        "searcherMetricValue": _searcher_metric(cluster, owner, one),
        "logRetentionDays": None,
        "metadata": cluster.run_metadata.get(one.id),
    }


def _searcher_metric(cluster: Cluster, owner: Experiment, one: Trial) -> float | None:
    """The best of a trial's validations, by the metric that is searched."""
    searcher = owner.config["searcher"]
    values = [
        float(each["metrics"][searcher["metric"]])
        for each in cluster.metrics.get(one.id, [])
        if each["group"] == "validation" and searcher["metric"] in each["metrics"]
    ]
    choose = min if searcher["smaller_is_better"] else max
    return choose(values) if values else None


def _best_trial(cluster: Cluster, owner: Experiment, trials: Sequence[Trial]) -> Json:
    ranked = [
        (value, one.id)
        for one in trials
        if (value := _searcher_metric(cluster, owner, one)) is not None
    ]
    choose = min if owner.config["searcher"]["smaller_is_better"] else max
    value, number = choose(ranked) if ranked else (None, None)
    return {"bestTrialSearcherMetric": value, "bestTrialId": number}


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


def metrics_report(trial_id: int, one: Mapping[str, Any]) -> Json:
    """v1MetricsReport."""
    key = _VALIDATION if one["group"] == "validation" else _OTHERS
    more = {} if one["batches"] is None else {"batch_metrics": one["batches"]}
    return {
        "trialId": trial_id,
        "endTime": one["time"],
        "metrics": {key: one["metrics"], **more},
        "totalBatches": one["steps"],
        "archived": False,
        "id": one["id"],
        "trialRunId": one["run"],
        "group": one["group"],
    }


def trial_log(number: int, trial_id: int, line: LogLine) -> Json:
    """v1TrialLogsResponse."""
    return {**_log(number, line), "trialId": trial_id}


def task_log(number: int, task_id: str, line: LogLine) -> Json:
    """v1TaskLogsResponse."""
    return {**_log(number, line), "taskId": task_id, "allocationId": line.allocation_id}


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
    """What ACTIVE is told as."""
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


def _summary(reports: Sequence[Mapping[str, Any]]) -> Json:
    result: dict[str, dict[str, Json]] = {}
    for report in reports:
        key = _VALIDATION if report["group"] == "validation" else _OTHERS
        if report["group"] not in ("training", "validation"):
            key = str(report["group"])
        for name, value in report["metrics"].items():
            numeric = isinstance(value, int | float) and not isinstance(value, bool)
            entry = result.setdefault(key, {}).setdefault(name, {"count": 0})
            entry.update(count=entry["count"] + 1, last=value)
            entry["type"] = "number" if numeric else "string"
            if numeric:
                entry["min"] = min(value, entry.get("min", value))
                entry["max"] = max(value, entry.get("max", value))
                entry["sum"] = value + entry.get("sum", 0)
                entry["mean"] = entry["sum"] / entry["count"]
    return result


def _size(one: Mapping[str, Any]) -> int:
    return sum(int(size) for size in one["resources"].values())


def _log(number: int, line: LogLine) -> Json:
    return {
        "id": str(number),
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
