"""What users ask: logins, experiments, trials, logs, metrics, checkpoints, custom searches."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from testing.master import archive, views
from testing.master.accounts import user_json
from testing.master.errors import FAILED_PRECONDITION, ApiError, not_found
from testing.master.requests import Answer, Master, Request, Route, Stream
from testing.master.states import State

Json = dict[str, Any]


def info(master: Master, request: Request) -> Answer:
    return {
        "version": master.version,
        "masterId": master.cluster.id,
        "clusterId": master.cluster.id,
        "clusterName": "stand-in",
        "telemetryEnabled": False,
        "ssoProviders": [],
        "externalLoginUri": "",
        "externalLogoutUri": "",
        "branding": "determined",
        "rbacEnabled": False,
        "product": "PRODUCT_UNSPECIFIED",
        "featureSwitches": [],
        "userManagementEnabled": True,
        "strictJobQueueControl": False,
        "hasCustomLogo": False,
    }


def login(master: Master, request: Request) -> Answer:
    name = request.body["username"]
    token = master.accounts.login(
        name, request.body.get("password") or "", is_hashed=bool(request.body.get("isHashed"))
    )
    return {"token": token, "user": user_json(name)}


def logout(master: Master, request: Request) -> Answer:
    master.accounts.end_session(request.token)
    return {}


def me(master: Master, request: Request) -> Answer:
    return {"user": user_json(request.user)}


def resource_pools(master: Master, request: Request) -> Answer:
    scheduler = master.cluster.scheduler
    texts = (
        "agentDockerImage agentDockerNetwork agentDockerRuntime agentFluentImage clusterName "
        "containerStartupScript description imageId instanceType location masterCertName "
        "masterUrl startupScript"
    )
    numbers = "auxContainersRunning maxAgentStartingPeriod maxAgents maxIdleAgentPeriod minAgents"
    pool = {
        **dict.fromkeys(texts.split(), ""),
        **dict.fromkeys(numbers.split(), 0),
        "name": "default",
        "type": "RESOURCE_POOL_TYPE_STATIC",
        "numAgents": len(scheduler.nodes),
        "slotsAvailable": sum(scheduler.nodes),
        "slotsUsed": scheduler.used,
        "slotType": "TYPE_CPU",
        "slotsPerAgent": max(scheduler.nodes),
        "auxContainerCapacity": 100,
        "auxContainerCapacityPerAgent": 100,
        "defaultAuxPool": True,
        "defaultComputePool": True,
        "preemptible": False,
        "schedulerType": "SCHEDULER_TYPE_FAIR_SHARE",
        "schedulerFittingPolicy": "FITTING_POLICY_BEST",
        "resourceManagerMetadata": {},
        "details": {},
    }
    return views.page("resourcePools", [pool], 0, 0)


def create_experiment(master: Master, request: Request) -> Answer:
    body = request.body
    files = body.get("modelDefinition") or []
    if body.get("validateOnly"):
        raise ApiError(FAILED_PRECONDITION, "the stand-in validates only by creating")
    experiment = master.cluster.create_experiment(
        body["config"],
        archive.pack(files) if files else b"",
        request.user,
        activate=bool(body.get("activate")),
    )
    return {
        "experiment": views.experiment(master.cluster, experiment),
        "config": experiment.config,
        "warnings": [],
    }


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
    experiment.notes = changes.get("notes", experiment.notes)
    for key in ("name", "description", "labels"):
        experiment.config[key] = changes.get(key, experiment.config[key])
    return {"experiment": views.experiment(master.cluster, experiment)}


def archive_experiment(master: Master, request: Request) -> Answer:
    experiment = master.cluster.experiment(request.id())
    if not experiment.state.is_terminal:
        raise ApiError(FAILED_PRECONDITION, "cannot archive experiment in non terminal state")
    experiment.archived = request.path.endswith("/archive")
    return {}


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


def model_def(master: Master, request: Request) -> Answer:
    return {"b64Tgz": archive.text(master.cluster.experiment(request.id()).model_def)}


def experiment_trials(master: Master, request: Request) -> Answer:
    experiment = master.cluster.experiment(request.id())
    trials = sorted(experiment.all_trials.values(), key=lambda trial: trial.id)
    if request.param("orderBy") == "ORDER_BY_DESC":
        trials.reverse()
    return _page(request, "trials", [views.trial(master.cluster, each) for each in trials])


def experiment_checkpoints(master: Master, request: Request) -> Answer:
    experiment = master.cluster.experiment(request.id())
    trials = experiment.all_trials.values()
    return _checkpoint_page(master, request, [c for t in trials for c in _checkpoints(master, t)])


def trial_checkpoints(master: Master, request: Request) -> Answer:
    trial = master.cluster.trial(request.id())
    return _checkpoint_page(master, request, _checkpoints(master, trial))


def get_trial(master: Master, request: Request) -> Answer:
    return {"trial": views.trial(master.cluster, master.cluster.trial(request.id()))}


def kill_trial(master: Master, request: Request) -> Answer:
    master.cluster.kill_trial(request.id())
    return {}


def trial_logs(master: Master, request: Request) -> Answer:
    trial = master.cluster.trial(request.id())

    def view(number: int, line: Any) -> Json:
        return views.trial_log(number, trial.id, line)

    return Stream(_log_rows(master, request, trial.task_id, view))


def task_logs(master: Master, request: Request) -> Answer:
    task_id = master.cluster.trial_of_task(request.parts["id"]).task_id

    def view(number: int, line: Any) -> Json:
        return views.task_log(number, task_id, line)

    return Stream(_log_rows(master, request, task_id, view))


def metrics(group: str | None) -> Callable[[Master, Request], Answer]:
    def handler(master: Master, request: Request) -> Answer:
        wanted = group or request.param("group")
        rows = [
            views.metrics_report(trial_id, each)
            for trial_id in map(int, request.params.get("trialIds", []))
            for each in master.cluster.metrics.get(trial_id, [])
            if not wanted or each["group"] == wanted
        ]
        return Stream(iter([{"result": {"metrics": rows}}] if rows else []))

    return handler


def get_checkpoint(master: Master, request: Request) -> Answer:
    return {"checkpoint": views.checkpoint(master.cluster, _checkpoint(master, request))}


def download_checkpoint(master: Master, request: Request) -> Answer:
    """The archive of a checkpoint on the cluster's file system."""
    root = master.cluster.checkpoint_path(_checkpoint(master, request))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as opened:
        for path in sorted(root.rglob("*")):
            opened.add(path, path.relative_to(root).as_posix(), recursive=False)
    return buffer.getvalue()


def searcher_events(master: Master, request: Request) -> Answer:
    """A long poll. Only an event ends it early; that the experiment stops does not."""
    experiment = master.cluster.experiment(request.id())
    again = master.redelivered.pop(experiment.id, [])
    if not again and not experiment.events():
        count = experiment.queue.count
        master.wait(lambda: experiment.queue.count > count, master.poll_s)
        return {"searcherEvents": list(experiment.queue.events)}
    return {"searcherEvents": [*again, *experiment.events()]}


def searcher_operations(master: Master, request: Request) -> Answer:
    master.cluster.running_experiment(request.id()).post(request.body)
    return {}


def _page(request: Request, name: str, rows: list[Json]) -> Json:
    return views.page(
        name, rows, int(request.param("offset", "0")), int(request.param("limit", "0"))
    )


def _checkpoints(master: Master, trial: Any) -> list[Json]:
    return [views.checkpoint(master.cluster, each) for each in master.cluster.checkpoints_of(trial)]


def _checkpoint_page(master: Master, request: Request, rows: list[Json]) -> Answer:
    """Sorted by what is asked for; by the searcher's metric if nothing is."""
    keys: dict[str, Callable[[Json], Any]] = {
        "SORT_BY_UUID": lambda row: row["uuid"],
        "SORT_BY_TRIAL_ID": lambda row: row["training"]["trialId"],
        "SORT_BY_BATCH_NUMBER": lambda row: row["metadata"].get("steps_completed") or 0,
        "SORT_BY_END_TIME": lambda row: row["reportTime"],
        "SORT_BY_STATE": lambda row: row["state"],
    }
    by = request.param("sortByAttr")
    descending = request.param("orderBy") == "ORDER_BY_DESC"
    if by in keys:
        rows.sort(key=keys[by], reverse=descending)
    else:
        name = request.param("sortByMetric")

        def metric(row: Json) -> Any:
            searcher = row["training"]["experimentConfig"]["searcher"]
            averages = row["training"]["validationMetrics"]["avgMetrics"]
            value = averages.get(name or searcher["metric"])
            smaller = not descending if name else searcher["smaller_is_better"]
            comparable = isinstance(value, int | float)
            return (not comparable, (value if smaller else -value) if comparable else 0)

        rows.sort(key=metric)
    return _page(request, "checkpoints", rows)


def _checkpoint(master: Master, request: Request) -> Json:
    found = master.cluster.checkpoints.get(request.parts["id"])
    if found is None:
        raise not_found(f"checkpoint '{request.parts['id']}' not found")
    return found


def _log_rows(
    master: Master, request: Request, task_id: str, view: Callable[[int, Any], Json]
) -> Iterator[Json]:
    levels = {level.removeprefix("LOG_LEVEL_") for level in request.params.get("levels", [])}
    ranks = {int(rank) for rank in request.params.get("rankIds", [])}
    stdtypes = set(request.params.get("stdtypes", []))
    text = request.param("searchText")
    limit = int(request.param("limit", "0"))

    def wanted(line: Any) -> bool:
        return (
            (not levels or line.level in levels)
            and (not ranks or line.rank in ranks)
            and (not stdtypes or line.stdtype in stdtypes)
            and text in line.log
        )

    def snapshot(start: int) -> list[tuple[int, Any]]:
        lines = master.cluster.logs.get(task_id, [])
        return list(enumerate(lines))[start:]

    with master.changed:
        rows = [(number, line) for number, line in snapshot(0) if wanted(line)]
        seen = len(master.cluster.logs.get(task_id, []))
    if request.param("orderBy") == "ORDER_BY_DESC":
        rows.reverse()
    for number, line in rows[:limit] if limit else rows:
        yield {"result": view(number + 1, line)}
    while request.flag("follow") and not master.stopping:
        with master.changed:
            master.wait(partial(snapshot, seen), 0.5)
            ended = master.cluster.trial_of_task(task_id).state.is_terminal
            fresh = snapshot(seen)
        seen += len(fresh)
        for number, line in fresh:
            if wanted(line):
                yield {"result": view(number + 1, line)}
        if ended:
            return


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
    Route("POST", "/api/v1/auth/logout", logout),
    Route("GET", "/api/v1/me", me),
    Route("GET", "/api/v1/resource-pools", resource_pools),
    Route("POST", "/api/v1/experiments", create_experiment),
    Route("GET", "/api/v1/experiments", get_experiments),
    Route("GET", "/api/v1/experiments/{id}", get_experiment),
    Route("PATCH", "/api/v1/experiments/{id}", patch_experiment),
    Route("POST", "/api/v1/experiments/{id}/kill", _KILL),
    Route("POST", "/api/v1/experiments/{id}/cancel", _CANCEL),
    Route("POST", "/api/v1/experiments/{id}/pause", _PAUSE),
    Route("POST", "/api/v1/experiments/{id}/activate", _ACTIVATE),
    Route("POST", "/api/v1/experiments/{id}/archive", archive_experiment),
    Route("POST", "/api/v1/experiments/{id}/unarchive", archive_experiment),
    Route("GET", "/api/v1/experiments/{id}/model_def", model_def),
    Route("GET", "/api/v1/experiments/{id}/trials", experiment_trials),
    Route("GET", "/api/v1/experiments/{id}/checkpoints", experiment_checkpoints),
    Route("GET", "/api/v1/experiments/{id}/searcher_events", searcher_events),
    Route("POST", "/api/v1/experiments/{id}/searcher_operations", searcher_operations),
    Route("GET", "/api/v1/trials/metrics/trial_metrics", metrics(None)),
    Route("GET", "/api/v1/trials/metrics/validation_metrics", metrics("validation")),
    Route("GET", "/api/v1/trials/metrics/training_metrics", metrics("training")),
    Route("GET", "/api/v1/trials/{id}", get_trial),
    Route("POST", "/api/v1/trials/{id}/kill", kill_trial),
    Route("GET", "/api/v1/trials/{id}/logs", trial_logs),
    Route("GET", "/api/v1/trials/{id}/checkpoints", trial_checkpoints),
    Route("GET", "/api/v1/tasks/{id}/logs", task_logs),
    Route("GET", "/api/v1/checkpoints/{id}", get_checkpoint),
    Route("GET", "/checkpoints/{id}", download_checkpoint),
]
