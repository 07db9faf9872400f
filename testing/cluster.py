"""A master for unit tests: events and operations of a custom search, without HTTP or processes.

It keeps to what determined 0.37 does: an event stays until operations are posted for it, a trial
that reports goes on until it is closed, one that fails is closed by itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsat.determined_cluster.engine import (
    CLOSE,
    CREATE,
    SHUTDOWN,
    VALIDATE,
    ClusterEngine,
    Operation,
)
from dsat.determined_cluster.job import Job
from dsat.determined_cluster.master import RemoteCluster
from dsat.determined_cluster.search import ClusterSearch
from dsat.in_trial.cluster_rank import OUTCOME_KEY
from dsat.inputs.ds_config import DSAT_TRIAL_KEY
from dsat.space.plan import Plan
from dsat.values.outcome import Outcome
from dsat.values.trial import TrialOptions
from testing.helpers import plan_of


def job_of(plan: Plan, *, num_slots: int = 2) -> Job:
    """A search that may use so many slots at once."""
    return Job(
        plan=plan,
        info={"name": "test"},
        config={},
        hparams={"deepspeed_config": "ds.json"},
        trial=TrialOptions(timeout_s=600.0),
        max_concurrent_trials=num_slots // plan.slots_per_trial,
    )


@dataclass(frozen=True)
class Event:
    """One of the master's; `kind` is created, validated, failed, canceled or closed."""

    id: int
    kind: str
    request_id: str = ""
    metric: Any = None


@dataclass
class FakeMaster(RemoteCluster):
    """The master's side of a custom experiment.

    Attributes:
        events: not yet acknowledged.
        posted: all operations, as (kind, request id).
        logs: of trials, by dsat's number.
        active: trials that have something to do, by request id.
    """

    events: list[Event] = field(default_factory=list)
    posted: list[tuple[str, str]] = field(default_factory=list)
    logs: dict[int, list[str]] = field(default_factory=dict)
    active: dict[str, int] = field(default_factory=dict)
    created: dict[str, int] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)
    over: bool = False
    count: int = 0

    def __post_init__(self) -> None:
        self.tell("initial")

    def tell(self, kind: str, request_id: str = "", metric: Any = None) -> None:
        self.count += 1
        self.events.append(Event(self.count, kind, request_id, metric))

    def post(self, event_id: int, operations: Sequence[Operation]) -> None:
        ids = [event.id for event in self.events]
        assert event_id in ids, f"event {event_id} not found"
        self.events = self.events[ids.index(event_id) + 1 :]
        self.apply(operations)

    def apply(self, operations: Sequence[Operation]) -> None:
        for [(kind, given)] in (operation.items() for operation in operations):
            if kind == SHUTDOWN:
                self.posted.append((SHUTDOWN, str(given["failure"])))
                self.over = True
                continue
            request_id = given.get("validateAfter", given)["requestId"]
            self.posted.append((kind, request_id))
            if kind == CREATE:
                assert request_id not in self.created, "a second trial with the same request id"
                self.created[request_id] = json.loads(given["hyperparams"])[DSAT_TRIAL_KEY]["id"]
                self.tell("created", request_id)
            elif kind == VALIDATE:
                self.active[request_id] = self.created[request_id]
            else:
                assert kind == CLOSE and request_id in self.reported
                self.tell("closed", request_id)

    # -- what trials do

    def report(self, request_id: str, metric: Any) -> None:
        del self.active[request_id]
        self.reported.add(request_id)
        self.tell("validated", request_id, metric)

    def fail(self, request_id: str, log: str = "") -> None:
        self.logs[self.active.pop(request_id)] = log.splitlines()
        self.tell("failed", request_id)
        self.tell("closed", request_id)

    def leave(self, request_id: str, log: str = "") -> None:
        """Exit status 0 without a report, or InvalidHP."""
        self.logs[self.active.pop(request_id)] = log.splitlines()
        self.tell("closed", request_id)

    # -- what the engine asks

    def log(self, trial_id: int) -> Sequence[str]:
        return self.logs.get(trial_id, [])

    def kill(self, trial_id: int) -> None:
        for request_id, number in list(self.active.items()):
            if number == trial_id:
                del self.active[request_id]
                self.tell("canceled", request_id)
                self.tell("closed", request_id)


def engine_of(master: FakeMaster, plan: Plan | None = None, **options: Any) -> ClusterEngine:
    return ClusterEngine(job_of(plan or plan_of()), 1, master, **options)


def search_of(
    plan: Plan,
    master: FakeMaster,
    events: Sequence[dict[str, Any]] = (),
    *,
    say: Callable[[str], None] = lambda line: None,
    num_slots: int = 2,
    clock: Callable[[], float] = time.time,
) -> ClusterSearch:
    job = job_of(plan, num_slots=num_slots)
    engine = ClusterEngine(job, 1, master)
    return ClusterSearch(job, engine, events=events, say=say, clock=clock)


def answer(search: ClusterSearch, event: Event) -> list[Operation]:
    """As the runner hands an event in."""
    request, reason = {"requestId": event.request_id}, "EXITED_REASON_USER_CANCELED"
    kinds: dict[str, dict[str, Any]] = {
        "initial": {"initialOperations": {"placeholder": 0}},
        "created": {"trialCreated": request},
        "validated": {"validationCompleted": {**request, "metric": event.metric}},
        "failed": {"trialExitedEarly": {**request, "exitedReason": "EXITED_REASON_UNSPECIFIED"}},
        "canceled": {"trialExitedEarly": {**request, "exitedReason": reason}},
        "closed": {"trialClosed": request},
    }
    return search.answer({"id": event.id, **kinds[event.kind]})


def metric_of(outcome: Outcome) -> dict[str, Any]:
    """Return a trial's report, after the way through JSON."""
    found: dict[str, Any] = json.loads(json.dumps({OUTCOME_KEY: outcome.to_json()}))
    return found
