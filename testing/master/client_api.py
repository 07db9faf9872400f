"""Requests of users: logins, experiments, trials, logs, metrics, checkpoints, custom searches."""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from testing.master import views
from testing.master.errors import FAILED_PRECONDITION, ApiError, not_found
from testing.master.requests import Answer, Master, Request, Route, Stream
from testing.master.states import State

Json = dict[str, Any]
_DIRECTORY = 53  # the tar type '5'; 48, or '0', is a file


def info(master: Master, request: Request) -> Answer:
    """Return what determined's client requires of v1GetMasterResponse."""
    texts = ("clusterName", "externalLoginUri", "externalLogoutUri")
    flags = ("telemetryEnabled", "rbacEnabled", "strictJobQueueControl", "hasCustomLogo")
    return {
        **dict.fromkeys(texts, ""),
        **dict.fromkeys(flags, False),
        "version": master.version,
        "masterId": master.cluster.id,
        "clusterId": master.cluster.id,
        "branding": "determined",
    }


def login(master: Master, request: Request) -> Answer:
    name = request.body["username"]
    token = master.accounts.login(
        name, request.body.get("password") or "", is_hashed=bool(request.body.get("isHashed"))
    )
    return {"token": token, "user": views.user(name)}


def me(master: Master, request: Request) -> Answer:
    return {"user": views.user(request.user)}


def create_experiment(master: Master, request: Request) -> Answer:
    body = request.body
    files = body.get("modelDefinition") or []
    if body.get("validateOnly"):
        raise ApiError(FAILED_PRECONDITION, "the stand-in validates only by creating")
    experiment = master.cluster.create_experiment(
        body["config"],
        _archive(files) if files else b"",
        request.user,
        activate=bool(body.get("activate")),
    )
    return {
        "experiment": views.experiment(master.cluster, experiment),
        "config": experiment.config,
        "warnings": [],
    }


def _archive(files: Iterable[Mapping[str, Any]]) -> bytes:
    """A gzipped tar archive of v1File items."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in files:
            content = base64.b64decode(file.get("content") or "")
            info = tarfile.TarInfo(file["path"])
            info.mode = int(file.get("mode") or 0o644)
            info.mtime = int(file.get("mtime") or 0)
            if int(file["type"]) == _DIRECTORY:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def get_experiments(master: Master, request: Request) -> Answer:
    rows = [views.experiment(master.cluster, each) for each in master.cluster.experiments.values()]
    return _page(request, "experiments", rows)


def get_experiment(master: Master, request: Request) -> Answer:
    experiment = master.cluster.experiment(request.id())
    view = views.experiment(master.cluster, experiment)
    return {"experiment": view, "jobSummary": None, "config": experiment.config}


def patch_experiment(master: Master, request: Request) -> Answer:
    experiment = master.cluster.experiment(request.id())
    changes = {key: value for key, value in request.body.items() if value is not None}
    for key in ("name", "description", "labels"):
        experiment.config[key] = changes.get(key, experiment.config[key])
    return {"experiment": views.experiment(master.cluster, experiment)}


def change_experiment(
    state: State, reason: str, idle: tuple[State, ...]
) -> Callable[[Master, Request], Answer]:
    """A handler for what the buttons of the web UI do.

    Args:
        idle: States in which there is nothing left to do.
    """

    def handler(master: Master, request: Request) -> Answer:
        experiment = master.cluster.experiment(request.id())
        if experiment.state in idle:
            return {}
        if not experiment.change_state(state, reason):
            raise ApiError(
                FAILED_PRECONDITION, f"experiment in incompatible state {experiment.state}"
            )
        return {}

    return handler


def experiment_trials(master: Master, request: Request) -> Answer:
    experiment = master.cluster.experiment(request.id())
    trials = sorted(experiment.all_trials.values(), key=lambda trial: trial.id)
    if request.param("orderBy") == "ORDER_BY_DESC":
        trials.reverse()
    return _page(request, "trials", [views.trial(master.cluster, each) for each in trials])


def get_trial(master: Master, request: Request) -> Answer:
    return {"trial": views.trial(master.cluster, master.cluster.trial(request.id()))}


def kill_trial(master: Master, request: Request) -> Answer:
    master.cluster.kill_trial(request.id())
    return {}


def trial_logs(master: Master, request: Request) -> Answer:
    trial = master.cluster.trial(request.id())
    text, limit = request.param("searchText"), int(request.param("limit", "0"))
    lines = enumerate(master.cluster.logs.get(trial.task_id, []), start=1)
    rows = [views.trial_log(number, trial.id, line) for number, line in lines if text in line.log]
    if request.param("orderBy") == "ORDER_BY_DESC":
        rows.reverse()
    return Stream([{"result": row} for row in (rows[:limit] if limit else rows)])


def get_checkpoint(master: Master, request: Request) -> Answer:
    found = master.cluster.checkpoints.get(request.parts["id"])
    if found is None:
        raise not_found(f"checkpoint '{request.parts['id']}' not found")
    return {"checkpoint": views.checkpoint(master.cluster, found)}


def searcher_events(master: Master, request: Request) -> Answer:
    """A long poll. Only an event ends it early; that the experiment stops does not."""
    experiment = master.cluster.experiment(request.id())
    again = master.redelivered.pop(experiment.id, [])
    if not again and not experiment.events():
        queue, count = experiment.queue, experiment.queue.count
        master.wait(lambda: master.has_news(queue, count), master.poll_s)
        return {"searcherEvents": list(queue.events)}
    return {"searcherEvents": [*again, *experiment.events()]}


def searcher_operations(master: Master, request: Request) -> Answer:
    master.cluster.running_experiment(request.id()).post(request.body)
    return {}


def _page(request: Request, name: str, rows: list[Json]) -> Json:
    return views.page(
        name, rows, int(request.param("offset", "0")), int(request.param("limit", "0"))
    )


_STOPPED = (State.COMPLETED, State.CANCELED, State.ERROR)
_STOPPING = (
    State.STOPPING_COMPLETED,
    State.STOPPING_CANCELED,
    State.STOPPING_KILLED,
    State.STOPPING_ERROR,
)
_CANCEL = change_experiment(
    State.STOPPING_CANCELED, "user requested cancellation", (*_STOPPED, *_STOPPING)
)
_KILL = change_experiment(
    State.STOPPING_KILLED, "user requested kill", (*_STOPPED, State.STOPPING_KILLED)
)
_PAUSE = change_experiment(State.PAUSED, "user requested pause", ())
_ACTIVATE = change_experiment(State.ACTIVE, "user requested activation", ())

ROUTES = [
    Route("GET", "/info", info, needs_login=False),
    Route("GET", "/api/v1/master", info, needs_login=False),
    Route("POST", "/api/v1/auth/login", login, needs_login=False),
    Route("GET", "/api/v1/me", me),
    Route("POST", "/api/v1/experiments", create_experiment),
    Route("GET", "/api/v1/experiments", get_experiments),
    Route("GET", "/api/v1/experiments/{id}", get_experiment),
    Route("PATCH", "/api/v1/experiments/{id}", patch_experiment),
    Route("POST", "/api/v1/experiments/{id}/kill", _KILL),
    Route("POST", "/api/v1/experiments/{id}/cancel", _CANCEL),
    Route("POST", "/api/v1/experiments/{id}/pause", _PAUSE),
    Route("POST", "/api/v1/experiments/{id}/activate", _ACTIVATE),
    Route("GET", "/api/v1/experiments/{id}/trials", experiment_trials),
    Route("GET", "/api/v1/experiments/{id}/searcher_events", searcher_events),
    Route("POST", "/api/v1/experiments/{id}/searcher_operations", searcher_operations),
    Route("GET", "/api/v1/trials/{id}", get_trial),
    Route("POST", "/api/v1/trials/{id}/kill", kill_trial),
    Route("GET", "/api/v1/trials/{id}/logs", trial_logs),
    Route("GET", "/api/v1/checkpoints/{id}", get_checkpoint),
]
