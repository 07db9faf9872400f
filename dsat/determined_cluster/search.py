"""Search on a cluster: the tuner and the engine, driven by searcher events.

The runner may die at any moment. The master keeps every event until operations are posted for it,
and sends all kept events again. The runner's state is its latest checkpoint, saved after an event
is handled and before its operations are posted. Therefore:

- Death before the state is saved: no operation of the event was posted. The master sends the event
  again, and the search decides again.
- Death between saving and posting: the master sends the event again. The journal holds the
  decisions and, by the event's number, the answer: the event gets the same operations with the same
  request ids.
- Death after posting: the master does not send the event again.
- An event that changes nothing has no answer in the journal. Handling it again changes nothing.
- A second report on a trial that has ended, and events of other searches' trials, change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsat.determined_cluster.engine import (
    CLOSED,
    COMPLETED,
    EXITED,
    SHUTDOWN,
    ClusterEngine,
    Operation,
)
from dsat.determined_cluster.job import Job
from dsat.run.events import EVENT_PAUSED
from dsat.run.journal import MemoryJournal
from dsat.run.run import Run
from dsat.run.tuner import Tuner
from dsat.show.log_lines import Kind, Narrator

EVENT_ANSWERED = "answered"
EVENT_FULL_RUN = "full_run"
# Events that call for a decision.
_DECISIVE = {"initialOperations", COMPLETED, EXITED, CLOSED}


class ClusterSearch:
    """Search that answers each event of the master with operations.

    It continues from `events`, the journal of an earlier process; empty for a new search.
    """

    def __init__(
        self,
        job: Job,
        engine: ClusterEngine,
        *,
        events: Sequence[Mapping[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        self.engine = engine
        self.journal = MemoryJournal(events)
        self.tuner = Tuner(
            job.plan,
            self.journal,
            info=job.info,
            clock=time.time,  # also counts while no process runs
            last_event_s=_last_event_s(events),
        )
        self._narrator = Narrator(
            lambda kind, text: say(f"warning: {text}" if kind is Kind.WARNING else text)
        )
        self._answers: dict[int, list[Operation]] = {
            event["id"]: event["operations"] for event in events if event["event"] == EVENT_ANSWERED
        }
        for trial in self.run.trials.values():
            engine.adopt(trial, self.run.outcomes.get(trial.id))

    @property
    def run(self) -> Run:
        return self.tuner.run

    @property
    def over(self) -> bool:
        return self.run.stop_reason is not None

    @property
    def progress(self) -> float:
        """Return the progress, between 0 and 1."""
        if self.over:
            return 1.0
        return min(len(self.run.outcomes) / self.tuner.plan.max_trials, 1.0)

    def answer(self, event: Mapping[str, Any]) -> list[Operation]:
        """Return the operations that answer an event; both are the master's JSON."""
        number = event["id"]
        if number in self._answers:
            return self._answers[number]
        count = len(self.journal.events)
        operations: list[Operation] = []
        if not self.over and event.keys() & _DECISIVE:
            operations = [*self._record(event), *self._decide()]
        if operations or len(self.journal.events) > count:
            self._answers[number] = operations
            self.journal.append(
                {
                    "event": EVENT_ANSWERED,
                    "id": number,
                    "operations": operations,
                    "at_s": round(time.time(), 3),
                }
            )
        return operations

    def _record(self, event: Mapping[str, Any]) -> list[Operation]:
        ended = self.engine.end(event)
        if ended is None:
            return []
        trial_id, outcome, operations = ended
        tuner, run = self.tuner, self.run
        searched = tuner.decisions.search_began
        tuner.record(trial_id, outcome)
        self._narrator.ended(run, run.trials[trial_id], outcome)
        if tuner.decisions.search_began and not searched:
            self._narrator.began(run, tuner.decisions.forecast)
        return operations

    def _decide(self) -> list[Operation]:
        tuner, operations = self.tuner, []
        for trial in tuner.next_trials(self.engine.free_slots):
            operations += self.engine.launch(trial)
            self._narrator.started(self.run, trial)
        if tuner.finished:
            tuner.stop()
            failed = tuner.decisions.failure is not None
            operations.append({SHUTDOWN: {"cancel": False, "failure": failed}})
        return operations


def _last_event_s(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the last time that an event records; None if none does, or a pause follows it."""
    for event in reversed(events):
        if event["event"] == EVENT_PAUSED:
            return None
        if "at_s" in event:
            return float(event["at_s"])
    return None
