"""Requests of tasks: context, rendezvous, operations, preemption, reports."""

from __future__ import annotations

import base64
from typing import Any

from testing.master.errors import not_found
from testing.master.requests import Answer, Master, Request, Route
from testing.master.trial import Trial

Json = dict[str, Any]


def context_directory(master: Master, request: Request) -> Answer:
    trial = master.cluster.trial_of_task(request.parts["id"])
    model_def = master.cluster.experiments[trial.experiment_id].model_def
    return {"b64Tgz": base64.b64encode(model_def).decode("ascii")}


def rendezvous(master: Master, request: Request) -> Answer:
    """Answer at once: every allocation has a single container."""
    allocation = master.cluster.allocation(request.parts["id"])
    allocation.ready = True
    slots = [len(allocation.slot_ids)]
    return {"rendezvousInfo": {"addresses": ["127.0.0.1"], "rank": 0, "slots": slots}}


def preemption(master: Master, request: Request) -> Answer:
    """Long poll for a request to preempt the allocation."""
    allocation = master.cluster.allocation(request.parts["id"])
    timeout_s = min(float(request.param("timeout_seconds", "0")), master.poll_s)
    master.wait(lambda: allocation.preempt or allocation.ended, timeout_s)
    return {"preempt": allocation.preempt}


def ack_preemption(master: Master, request: Request) -> Answer:
    master.cluster.allocation(request.parts["id"]).acknowledged = True
    return {}


def current_operation(master: Master, request: Request) -> Answer:
    trial = _searched(master, request)
    length = str(trial.searcher.length)
    return {
        "op": {"validateAfter": {"requestId": trial.request_id, "length": length}},
        "completed": trial.searcher.complete,
    }


def completed_operation(master: Master, request: Request) -> Answer:
    trial = _searched(master, request)
    experiment = master.cluster.experiments[trial.experiment_id]
    length = int(request.body["op"]["length"])
    experiment.complete_operation(trial, length, request.body.get("searcherMetric"))
    return {}


def progress(master: Master, request: Request) -> Answer:
    trial = _searched(master, request)
    experiment = master.cluster.experiments[trial.experiment_id]
    if not (request.body.get("is_raw") or request.body.get("isRaw")):
        experiment.report_progress(trial, float(request.body["progress"]))
    return {}


def report_metrics(master: Master, request: Request) -> Answer:
    trial = master.cluster.trial(request.id())
    master.cluster.report_metrics(trial, request.body["group"], request.body["metrics"])
    return {}


def early_exit(master: Master, request: Request) -> Answer:
    master.cluster.early_exit(request.id(), request.body["reason"])
    return {}


def report_checkpoint(master: Master, request: Request) -> Answer:
    master.cluster.report_checkpoint(request.body)
    return {}


def accepted(master: Master, request: Request) -> Answer:
    """Accept a report, and ignore it."""
    return {}


def _searched(master: Master, request: Request) -> Trial:
    """Return the trial of a request about its search.

    Raises:
        ApiError: It has ended, so its experiment no longer knows it.
    """
    trial = master.cluster.trial(request.id())
    experiment = master.cluster.running_experiment(trial.experiment_id)
    if trial.request_id not in experiment.trials:
        raise not_found("trial not found")
    return trial


ROUTES = [
    Route("GET", "/api/v1/tasks/{id}/context_directory", context_directory),
    Route("POST", "/api/v1/allocations/{id}/acceleratorData", accepted),
    Route("GET", "/api/v1/allocations/{id}/resources/{resources}/rendezvous", rendezvous),
    Route("GET", "/api/v1/allocations/{id}/signals/preemption", preemption),
    Route("POST", "/api/v1/allocations/{id}/signals/ack_preemption", ack_preemption),
    Route("POST", "/api/v1/runs/start", lambda master, request: {"storageId": None}),
    Route("GET", "/api/v1/trials/{id}/searcher/operation", current_operation),
    Route("POST", "/api/v1/trials/{id}/searcher/completed_operation", completed_operation),
    Route("POST", "/api/v1/trials/{id}/progress", progress),
    Route("POST", "/api/v1/trials/{id}/metrics", report_metrics),
    Route("POST", "/api/v1/trials/{id}/early_exit", early_exit),
    Route("POST", "/api/v1/trials/{id}/runner/metadata", accepted),
    Route("POST", "/api/v1/checkpoints", report_checkpoint),
]
