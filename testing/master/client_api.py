"""Requests of users: logins, experiments, trials, logs, metrics, checkpoints, custom searches."""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Iterable, Mapping
from typing import Any

from testing.master import views
from testing.master.errors import FAILED_PRECONDITION, ApiError
from testing.master.requests import Answer, Handler, Master, Request, Route, Stream
from testing.master.states import END_OF, State

Json = dict[str, Any]
_DIRECTORY = 53  # the tar type '5'; 48, or '0', is a file


def info(master: Master, request: Request) -> Answer:
    """Return the fields of v1GetMasterResponse that determined's client requires."""
    ids = dict.fromkeys(("clusterName", "clusterId", "masterId"), master.cluster.id)
    flags = dict.fromkeys(("strictJobQueueControl", "hasCustomLogo"), False)
    return {**ids, **flags, "version": master.version}


def login(master: Master, request: Request) -> Answer:
    name = request.body["username"]
    token = master.accounts.login(name, request.body.get("password") or "")
    return {"token": token, "user": views.user(name)}


def create_experiment(master: Master, request: Request) -> Answer:
    body = request.body
    archive = _archive(body.get("modelDefinition") or [])
    activate = bool(body.get("activate"))
    made = master.cluster.create_experiment(
        body["config"], archive, request.user, activate=activate
    )
    return {
        "experiment": views.experiment(master.cluster, made),
        "config": made.config,
        "warnings": [],
    }


def _archive(files: Iterable[Mapping[str, Any]]) -> bytes:
    """Return a gzipped tar archive of v1File items."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for file in files:
            content = base64.b64decode(file.get("content") or "")
            info = tarfile.TarInfo(file["path"])
            info.mode, info.mtime = int(file.get("mode") or 0o644), int(file.get("mtime") or 0)
            if int(file["type"]) == _DIRECTORY:
                info.type = tarfile.DIRTYPE
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


def change_experiment(state: State, idle: tuple[State, ...] = ()) -> Handler:
    """Make a handler that changes an experiment's state, as a button of the web UI does.

    Args:
        state: the new state.
        idle: states in which the request succeeds without doing anything.
    """

    def handler(master: Master, request: Request) -> Answer:
        experiment = master.cluster.experiment(request.id())
        if experiment.state not in idle and not experiment.change_state(
            state, "a user requested it"
        ):
            problem = f"experiment in incompatible state {experiment.state}"
            raise ApiError(FAILED_PRECONDITION, problem)
        return {}

    return handler


def experiment_trials(master: Master, request: Request) -> Answer:
    experiment = master.cluster.experiment(request.id())
    trials = sorted(experiment.all_trials.values(), key=lambda trial: trial.id)
    if request.param("orderBy") == "ORDER_BY_DESC":
        trials.reverse()
    return _page(request, "trials", [views.trial(master.cluster, each) for each in trials])


def file_of_context(master: Master, request: Request) -> Answer:
    """Return one file of the uploaded context."""
    model_def = master.cluster.experiment(request.id()).model_def
    with tarfile.open(fileobj=io.BytesIO(model_def), mode="r:gz") as archive:
        file = archive.extractfile(request.body["path"])
        assert file is not None
        return {"file": base64.b64encode(file.read()).decode()}


def experiment_checkpoints(master: Master, request: Request) -> Answer:
    """Return checkpoints, the newest first; `orderBy` is ignored."""
    trials = master.cluster.experiment(request.id()).all_trials.values()
    rows = [each for trial in trials for each in master.cluster.checkpoints_of(trial)]
    return _page(request, "checkpoints", rows[::-1])


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


def searcher_events(master: Master, request: Request) -> Answer:
    """Long poll for events. Only an event ends it early; the end of the experiment does not."""
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
_CANCEL = change_experiment(State.STOPPING_CANCELED, (*_STOPPED, *END_OF))
_KILL = change_experiment(State.STOPPING_KILLED, (*_STOPPED, State.STOPPING_KILLED))
_PAUSE = change_experiment(State.PAUSED)
_ACTIVATE = change_experiment(State.ACTIVE)

ROUTES = [
    Route("GET", "/info", info, needs_login=False),
    Route("GET", "/api/v1/master", info, needs_login=False),
    Route("POST", "/api/v1/auth/login", login, needs_login=False),
    Route("GET", "/api/v1/me", lambda master, request: {"user": views.user(request.user)}),
    Route("POST", "/api/v1/experiments", create_experiment),
    Route("GET", "/api/v1/experiments", get_experiments),
    Route("GET", "/api/v1/experiments/{id}", get_experiment),
    Route("PATCH", "/api/v1/experiments/{id}", patch_experiment),
    Route("POST", "/api/v1/experiments/{id}/kill", _KILL),
    Route("POST", "/api/v1/experiments/{id}/cancel", _CANCEL),
    Route("POST", "/api/v1/experiments/{id}/pause", _PAUSE),
    Route("POST", "/api/v1/experiments/{id}/activate", _ACTIVATE),
    Route("GET", "/api/v1/experiments/{id}/trials", experiment_trials),
    Route("GET", "/api/v1/experiments/{id}/checkpoints", experiment_checkpoints),
    Route("POST", "/api/v1/experiments/{id}/file", file_of_context),
    Route("GET", "/api/v1/experiments/{id}/searcher_events", searcher_events),
    Route("POST", "/api/v1/experiments/{id}/searcher_operations", searcher_operations),
    Route("GET", "/api/v1/trials/{id}", get_trial),
    Route("POST", "/api/v1/trials/{id}/kill", kill_trial),
    Route("GET", "/api/v1/trials/{id}/logs", trial_logs),
]
