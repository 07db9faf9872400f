"""An experiment and its searcher: operations in, events out.

Follows `master/internal/experiment.go` and `master/pkg/searcher/{searcher,custom_search}.go`. Pure.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from testing.master.config import point_of
from testing.master.errors import INTERNAL, ApiError, invalid
from testing.master.states import END_OF, EXPERIMENT_MOVES, State
from testing.master.trial import ERRORED, USER_CANCELED, SearcherState, Trial

if TYPE_CHECKING:
    from testing.master.cluster import Cluster

Json = dict[str, Any]


class EventQueue:
    """The events of a custom searcher that are not acknowledged yet."""

    def __init__(self) -> None:
        self.events: list[Json] = []
        self.count = 0

    def put(self, kind: str, event: Json) -> None:
        self.count += 1
        self.events.append({"id": self.count, kind: event})

    def remove_up_to(self, event_id: int) -> None:
        """Acknowledge an event and all before it.

        Raises:
            ApiError: The event is not in the queue.
        """
        ids = [event["id"] for event in self.events]
        if event_id not in ids:
            raise ApiError(
                INTERNAL, "failed to post operations: failed to remove events from queue"
            )
        del self.events[: ids.index(event_id) + 1]


class Experiment:
    """An experiment with a `single` or a `custom` searcher.

    Attributes:
        trials: The trials that have not ended, by request id.
        all_trials: All trials, by request id.
        posted: Every accepted POST of operations, unchanged.
        progress: The progress that the master's database holds, 0 to 1.
    """

    def __init__(
        self,
        id: int,
        config: Json,
        original_config: str,
        model_def: bytes,
        owner: str,
        host: Cluster,
    ) -> None:
        self.id = id
        self.config = config
        self.original_config = original_config
        self.model_def = model_def
        self.owner = owner
        self.job_id = str(uuid.uuid4())
        self.start_time = host.now()
        self.state = State.ACTIVE
        self.progress = 0.0
        self.trials: dict[str, Trial] = {}
        self.all_trials: dict[str, Trial] = {}
        self.queue = EventQueue()
        self.posted: list[Json] = []
        self._host = host
        self._search_progress = 0.0
        self._searcher_states: dict[str, SearcherState] = {}
        self._completed: set[tuple[str, int]] = set()
        self._requested = 0
        self._closed: set[str] = set()
        self._failures: set[str] = set()
        self._cancels: set[str] = set()

    @property
    def is_custom(self) -> bool:
        return bool(self.config["searcher"]["name"] == "custom")

    def start(self) -> None:
        """Start the search: send the initial event, or create the only trial."""
        if self.is_custom:
            self.queue.put("initialOperations", {"placeholder": 0})
            return
        request_id = str(uuid.uuid4())
        hparams = point_of(self.config["hyperparameters"])
        self.process(
            [
                {"createTrial": {"requestId": request_id, "hyperparams": json.dumps(hparams)}},
                _validate_after(request_id, _length(self.config["searcher"]["max_length"])),
                {"closeTrial": {"requestId": request_id}},
            ]
        )

    def post(self, request: Json) -> None:
        """Accept operations that answer an event, and execute them.

        Raises:
            ApiError: The event is not in the queue: acknowledged earlier, or never sent.
        """
        self._require_custom()
        self.queue.remove_up_to(int(request["triggeredByEvent"]["id"]))
        self.posted.append(request)
        self.process(request.get("searcherOperations") or [])

    def events(self) -> list[Json]:
        """Return the unacknowledged events, or an event that says that the experiment is
        inactive."""
        if self.state is not State.ACTIVE:
            inactive = {"experimentState": str(self.state)}
            return [{"id": -1, "experimentInactive": inactive}]
        self._require_custom()
        return list(self.queue.events)

    def complete_operation(self, trial: Trial, length: int, metric: Any) -> None:
        """Handle a trial's report that its current operation is complete.

        Raises:
            ApiError: It is not the trial's current operation, or was completed before.
        """
        searcher = trial.searcher
        if length != searcher.length:
            raise invalid(
                f"expected op {{{trial.request_id} {searcher.length}}} but received op "
                f"{{{trial.request_id} {length}}}"
            )
        if searcher.complete:
            raise invalid(
                f"received op {{{trial.request_id} {length}}} which was previously completed"
            )
        searcher.complete = True
        trial.searcher_changed()
        if (trial.request_id, length) in self._completed:
            self.change_state(State.STOPPING_ERROR, "operation was already completed")
            return
        self._completed.add((trial.request_id, length))
        if self.is_custom:
            event = {
                "requestId": trial.request_id,
                "metric": metric,
                "validateAfterLength": str(length),
            }
            self.queue.put("validationCompleted", event)

    def report_progress(self, trial: Trial, units: float) -> None:
        if self.is_custom:
            event = {"requestId": trial.request_id, "partialUnits": units}
            self.queue.put("trialProgress", event)
            # The database gets the searcher's progress only at a trial's report.
            self.progress = self._search_progress
        else:
            self.progress = min(1.0, units / max(1, trial.searcher.length))

    def change_state(self, state: State, reason: str) -> bool:
        """Change the state of the experiment and its trials; return False if that is not
        allowed."""
        if state is self.state:
            return True
        if state not in EXPERIMENT_MOVES.get(self.state, ()):
            return False
        self.state = state
        for trial in list(self.trials.values()):
            trial.patch(state, reason)
        self._maybe_end()
        return True

    def _require_custom(self) -> None:
        if not self.is_custom:
            raise ApiError(INTERNAL, "unsupported operation for this search method")

    def process(self, operations: Iterable[Mapping[str, Any]]) -> None:
        if self.state.is_stopping or self.state.is_terminal:
            return
        updated: dict[str, None] = {}
        for operation in operations:
            for kind, value in operation.items():
                if value is not None:
                    self._process_one(kind, value, updated)
        for request_id in updated:
            if request_id in self.trials:
                self.trials[request_id].searcher_changed()

    def _process_one(self, kind: str, value: Json, updated: dict[str, None]) -> None:
        if kind == "createTrial":
            self._create(value["requestId"], json.loads(value["hyperparams"]))
        elif kind == "trialOperation":
            validate_after = value["validateAfter"]
            state = self._searcher_state(validate_after["requestId"])
            state.length, state.complete = int(validate_after["length"]), False
            updated[validate_after["requestId"]] = None
        elif kind == "closeTrial":
            self._searcher_state(value["requestId"]).closed = True
            updated[value["requestId"]] = None
        elif kind == "setSearcherProgress":
            self._search_progress = float(value["progress"])
        elif kind == "shutDown":
            self._shut_down(bool(value.get("cancel")), bool(value.get("failure")))
        else:
            raise ApiError(INTERNAL, f"unimplemented op {kind}")

    def _searcher_state(self, request_id: str) -> SearcherState:
        return self._searcher_states.setdefault(request_id, SearcherState())

    def _create(self, request_id: str, hparams: Json) -> None:
        self._requested += 1
        if request_id in self.trials:
            return
        if request_id in self.all_trials:
            # The database refuses a second trial with this id, so the trial is closed at once.
            self._closed.add(request_id)
            self._put("trialClosed", request_id)
            return
        state = SearcherState()
        self._searcher_states[request_id] = state
        trial = Trial(
            id=self._host.new_trial_id(),
            request_id=request_id,
            experiment_id=self.id,
            task_id=f"{self.id}.{request_id}",
            hparams=hparams,
            seed=int(self.config["reproducibility"]["experiment_seed"]),
            max_restarts=int(self.config["max_restarts"]),
            host=self._host,
            on_end=self._ends(request_id),
            state=self.state,
            searcher=state,
        )
        self.trials[request_id] = self.all_trials[request_id] = trial
        self._put("trialCreated", request_id)

    def _ends(self, request_id: str) -> Callable[[str | None], None]:
        return lambda reason: self._trial_ended(request_id, reason)

    def _trial_ended(self, request_id: str, reason: str | None) -> None:
        trial = self.trials.pop(request_id)
        if reason is not None:
            trial.searcher.complete = trial.searcher.closed = True
            exits = {ERRORED: self._failures, USER_CANCELED: self._cancels}
            exits[reason].add(request_id)
            self._put("trialExitedEarly", request_id, exitedReason=reason)
        self._closed.add(request_id)
        self._put("trialClosed", request_id)
        if not self.is_custom and len(self._closed) == self._requested:
            self._shut_down(
                cancel=len(self._cancels) >= self._requested,
                failure=len(self._failures) >= self._requested,
            )
        self._maybe_end()

    def _put(self, kind: str, request_id: str, **more: Any) -> None:
        if self.is_custom:
            self.queue.put(kind, {"requestId": request_id, **more})

    def _shut_down(self, cancel: bool, failure: bool) -> None:
        if failure:
            self.change_state(State.STOPPING_ERROR, "hp search failed")
        elif cancel:
            self.change_state(State.STOPPING_CANCELED, "hp search canceled")
        else:
            self.change_state(State.STOPPING_COMPLETED, "hp search completed")

    def _maybe_end(self) -> None:
        if self.state.is_stopping and not self.trials:
            self.state = END_OF[self.state]
            if self.state is State.COMPLETED:
                self.progress = 1.0


def _validate_after(request_id: str, length: int) -> Json:
    return {"trialOperation": {"validateAfter": {"requestId": request_id, "length": str(length)}}}


def _length(max_length: Any) -> int:
    """Return the number in `max_length: {batches: 100}` or `max_length: 100`."""
    if isinstance(max_length, Mapping):
        [max_length] = max_length.values()
    return int(max_length)
