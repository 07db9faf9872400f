"""The search on a cluster: the tuner and the engine, driven by searcher events.

What must hold whenever the runner dies. The master keeps every event until operations are posted
for it, and sends all that it kept again; the runner's state is its latest checkpoint, which is
saved after an event is handled and before the operations are posted. So:

- died before the state was saved: nothing of the event was posted. It comes again and is decided
  again; whatever was decided before is nobody's business.
- died between saving and posting: the event comes again although its decisions are in the journal.
  To decide twice would be wrong (other trials would be started, and the tuner would forget those
  that nobody was told of), so the answer to each event is part of the journal, under the event's
  number, and the same event gets the same operations with the same request ids.
- died after posting, or while posting with the master having heard it: the event does not come
  again. Its answer is in the journal and never asked for.
- an event that changes nothing (a trial was created, or closed when its outcome was known) has no
  answer in the journal: handling it again changes nothing again.
- an event that tells something a second time under another number (two reports of one trial) finds
  the trial ended and changes nothing; neither does one about a trial of somebody else.

Request ids derive from the search and the trial's number, so that an answer needs only the latter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dsat.determined_cluster.engine import ClusterEngine, Operation
from dsat.report.log_lines import Narrator
from dsat.space.plan import Plan
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.run import EVENT_PAUSED, Run
from dsat.tuning.tuner import Tuner

EVENT_ANSWERED = "answered"
EVENT_FULL_RUN = "full_run"


class ClusterSearch:
    """Decides what to tell the master on each of its events.

    Args:
        plan: what to tune.
        engine: fresh; it is told of the trials in `events`.
        info: for people, into the journal's first line.
        events: the journal of an earlier process, to continue from.
        say: prints a line.
        clock: seconds since the epoch, for the time between the deaths of a runner.

    Attributes:
        journal: the runner's checkpoints make it durable.
    """

    def __init__(
        self,
        plan: Plan,
        engine: ClusterEngine,
        *,
        info: Mapping[str, Any],
        events: Sequence[Mapping[str, Any]] = (),
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.engine = engine
        self.journal = MemoryJournal(events)
        self._clock = clock
        self.tuner = Tuner(
            plan,
            self.journal,
            info=info,
            events=[dict(event) for event in events],
            clock=clock,
            last_event_s=_last_heard_s(events),
        )
        self._say = say
        self._narrator = Narrator()
        self._answers = {
            event["id"]: [Operation(**data) for data in event["operations"]]
            for event in events
            if event["event"] == EVENT_ANSWERED
        }
        for trial in self.run.trials.values():
            engine.adopt(trial, ended=trial.id in self.run.outcomes)

    @property
    def run(self) -> Run:
        return self.tuner.run

    @property
    def over(self) -> bool:
        """Whether the master was told to shut the experiment down, or is being told now."""
        return self.run.stop_reason is not None

    @property
    def progress(self) -> float:
        """Between 0 and 1."""
        if self.over:
            return 1.0
        return min(len(self.run.outcomes) / self.tuner.plan.max_trials, 1.0)

    def pause(self) -> None:
        """The search rests from now on, until another process continues it."""
        self.tuner.pause()

    def begin(self, event_id: int) -> list[Operation]:
        """The answer to the experiment's first event."""
        return self._answer(event_id, lambda: None)

    def validated(self, event_id: int, request_id: str, metric: Any) -> list[Operation]:
        """The answer to a trial's report."""
        return self._answer(event_id, lambda: self.engine.validated(request_id, metric))

    def exited(self, event_id: int, request_id: str, *, canceled: bool) -> list[Operation]:
        """The answer to a trial's failure, or its end by a user."""
        return self._answer(event_id, lambda: self.engine.exited(request_id, canceled=canceled))

    def closed(self, event_id: int, request_id: str) -> list[Operation]:
        """The answer to the end of a trial."""
        return self._answer(event_id, lambda: self.engine.closed(request_id))

    def _answer(self, event_id: int, hear: Callable[[], None]) -> list[Operation]:
        if event_id in self._answers:
            return self._answers[event_id]
        known = len(self.journal.events)
        if not self.over:
            hear()
            self._decide()
        operations = self.engine.take_operations()
        if operations or len(self.journal.events) > known:
            self._answers[event_id] = operations
            told = [operation.to_json() for operation in operations]
            self.journal.append(
                {
                    "event": EVENT_ANSWERED,
                    "id": event_id,
                    "operations": told,
                    "at_s": round(self._clock(), 3),
                }
            )
        return operations

    def _decide(self) -> None:
        tuner, run = self.tuner, self.run
        for trial_id, outcome in self.engine.poll(0):
            searched = tuner.search_began
            tuner.record(trial_id, outcome)
            self._tell(self._narrator.ended(run, run.trials[trial_id], outcome))
            if tuner.search_began and not searched:
                self._tell(self._narrator.search_began(run, tuner.forecast))
        for trial in tuner.next_trials(self.engine.free_slots):
            self.engine.launch(trial)
            self._tell(self._narrator.started(trial))
        if tuner.finished:
            tuner.stop()
            self.engine.close(failure=tuner.failed)

    def _tell(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._say(line)


def _last_heard_s(events: Sequence[Mapping[str, Any]]) -> float | None:
    """When an earlier process was last heard of; None if it paused, or there was none."""
    for event in reversed(events):
        if event["event"] == EVENT_PAUSED:
            return None
        if "at_s" in event:
            return float(event["at_s"])
    return None
