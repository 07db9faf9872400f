"""The JSON of experiments, trials, users and logs, and the pagination of lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from testing.master.cluster import Cluster
from testing.master.experiment import Experiment
from testing.master.logs import LogLine
from testing.master.states import State
from testing.master.trial import Trial

Json = dict[str, Any]


def experiment(cluster: Cluster, one: Experiment) -> Json:
    """Return a v1Experiment."""
    config = one.config
    return {
        "id": one.id,
        "description": config["description"],
        "labels": config["labels"],
        "startTime": one.start_time,
        "state": _experiment_state(one),
        "archived": False,
        "numTrials": len(one.all_trials),
        "username": one.owner,
        "searcherType": config["searcher"]["name"],
        "name": config["name"],
        "jobId": one.job_id,
        "progress": one.progress,
        "projectId": cluster.project_of(config),
        "projectOwnerId": 1,
        "config": config,
        "originalConfig": one.original_config,
    }


def trial(cluster: Cluster, one: Trial) -> Json:
    """Return a trialv1Trial."""
    steps = [each["steps"] for each in cluster.metrics.get(one.id, [])]
    return {
        "id": one.id,
        "experimentId": one.experiment_id,
        "startTime": cluster.experiments[one.experiment_id].start_time,
        "state": _enriched([one]) if one.state is State.ACTIVE else str(one.state),
        "restarts": one.restarts,
        "hparams": one.hparams,
        "totalBatchesProcessed": max(steps, default=0),
        "taskId": one.task_id,
    }


def user(name: str) -> Json:
    """Return a v1User."""
    return {"id": 2, "username": name, "admin": False, "active": True}


def trial_log(number: int, trial_id: int, line: LogLine) -> Json:
    """Return a v1TrialLogsResponse."""
    return {
        "id": str(number),
        "trialId": trial_id,
        "timestamp": line.timestamp,
        "message": line.message,
        "level": f"LOG_LEVEL_{line.level or 'UNSPECIFIED'}",
        "rankId": line.rank,
        "log": line.log,
        "stdtype": line.stdtype,
    }


def page(name: str, rows: Sequence[Json], offset: int, limit: int) -> Json:
    """Return a part of a list, with its pagination."""
    end = len(rows) if limit <= 0 else min(len(rows), offset + limit)
    place = {"startIndex": min(offset, end), "endIndex": end, "total": len(rows)}
    return {name: list(rows[offset:end]), "pagination": {"offset": offset, "limit": limit, **place}}


def _experiment_state(one: Experiment) -> str:
    return _enriched(one.trials.values()) if one.state is State.ACTIVE else str(one.state)


def _enriched(trials: Iterable[Trial]) -> str:
    """Return what the API shows for the state ACTIVE: running if a trial has slots, else queued."""
    if any(trial.allocation is not None and trial.allocation.started for trial in trials):
        return "STATE_RUNNING"
    return "STATE_QUEUED"
