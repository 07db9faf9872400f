"""The only decision loop: which trial next, what an outcome means, when to stop.

A state machine without I/O but the journal's, so that the same object serves an engine that is
polled and a cluster that sends events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dsat.memory.predictor import Basis
from dsat.space.plan import Plan
from dsat.tuning.decisions import Decisions
from dsat.tuning.events import (
    EVENT_BUDGET,
    EVENT_CANCEL_ASKED,
    EVENT_FINISHED,
    EVENT_MEMORY_BASIS,
    EVENT_PAUSED,
    EVENT_PROPOSED,
    EVENT_START,
    EVENT_STOP_ASKED,
    EVENT_STOPPED,
)
from dsat.tuning.journal import SCHEMA_VERSION, Journal, MemoryJournal
from dsat.tuning.replay import as_begun, replay
from dsat.tuning.run import Run
from dsat.values.codec import encode
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial


class Tuner:
    """Decides the trials of a run: profile, the user's own configuration, search and finals.

    Every decision is appended to the journal before it is returned, and every outcome before the
    search receives it. A tuner made from the events of an earlier one continues as if it were it.

    Args:
        plan: what to tune. Must agree with the plan in `events`, but for the number of trials.
        journal: takes new events.
        info: for people, into the journal's first line.
        events: those of an earlier tuner, to continue from.
        clock: seconds, monotonic; only to tell people how long things took.
        time_of_day: seconds since the epoch, for the dates of events; without it they have none.
        last_event_s: since when time counts, by this clock, if it is not from now on: the last of
            `events`, or the start of the command.

    Attributes:
        decisions: those that follow from the events so far.
    """

    def __init__(
        self,
        plan: Plan,
        journal: Journal | MemoryJournal,
        *,
        info: Mapping[str, Any] | None = None,
        events: list[dict[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] | None = None,
        last_event_s: float | None = None,
    ) -> None:
        self.plan = plan = as_begun(plan, events or [])
        self.decisions = Decisions(plan)
        self._journal = journal
        self._clock = clock
        self._time_of_day = time_of_day
        self._last_event_s = clock() if last_event_s is None else last_event_s
        replay(self.decisions, events or [])
        if not self.run.has_begun:
            self._append(
                {
                    "event": EVENT_START,
                    "schema": SCHEMA_VERSION,
                    "plan": plan,
                    "info": dict(info or {}),
                }
            )
        elif self.run.planned_trials != plan.max_trials:
            self._append(self._budget(plan.max_trials))
        else:  # somebody may have asked for more
            self.plan = replace(plan, max_trials=self.run.plan.max_trials)
        if self.run.stop_asked:  # of the earlier tuner
            self._append({"event": EVENT_STOP_ASKED, "asked": False})
        asked = [e["trial_id"] for e in events or [] if e["event"] == EVENT_CANCEL_ASKED]
        for trial in self.run.running:
            if trial.id in asked:  # and the earlier tuner ended before the trial did
                self.record(trial.id, Outcome(OutcomeKind.CANCELED, message="canceled"))

    @property
    def run(self) -> Run:
        """The run so far."""
        return self.decisions.run

    def next_trials(self, free_slots: int) -> list[Trial]:
        """Trials to start now, as many as there is room and something to try for."""
        trials: list[Trial] = []
        while free_slots >= self.plan.slots_per_trial:
            event = self.decisions.next_event()
            if event is None:
                break
            self._append(event)
            if event["event"] == EVENT_PROPOSED:
                trials.append(event["trial"])
                free_slots -= self.plan.slots_per_trial
        return trials

    def record(self, trial_id: int, outcome: Outcome) -> None:
        """Enters what came of a trial; a second outcome of the same trial is ignored."""
        assert trial_id in self.run.trials, trial_id
        if trial_id in self.run.outcomes:
            return
        self._append({"event": EVENT_FINISHED, "trial_id": trial_id, "outcome": outcome})

    def ask_stop(self) -> None:
        """Starts no further trial; those that run come to their end."""
        if not self.run.stop_asked:
            self._append({"event": EVENT_STOP_ASKED, "asked": True})

    def ask_cancel(self, trial_id: int) -> None:
        """Records that somebody wants a trial ended, whose outcome follows."""
        self._append({"event": EVENT_CANCEL_ASKED, "trial_id": trial_id})

    def raise_budget(self, max_trials: int) -> None:
        """Raise the maximum number of trials; a smaller number changes nothing."""
        if max_trials > self.plan.max_trials:
            self._append({**self._budget(max_trials), "asked": True})
            self.plan = replace(self.plan, max_trials=max_trials)

    def _budget(self, max_trials: int) -> dict[str, Any]:
        event = {"event": EVENT_BUDGET, "max_trials": max_trials}
        return {**event, "converged": True} if self.decisions.converged else event

    def set_memory_basis(self, basis: Basis) -> None:
        """Enters what memory is predicted from, and begins the search."""
        assert self.decisions.needs_memory_basis
        self._append({"event": EVENT_MEMORY_BASIS, "basis": basis})

    @property
    def finished(self) -> bool:
        """Return whether the run is over and nothing runs."""
        return self.decisions.stop_reason is not None and not self.run.running

    def stop(self) -> None:
        """Records why the run is over."""
        assert self.finished
        reason = self.decisions.stop_reason
        if self.run.stop_reason != reason:
            self._append({"event": EVENT_STOPPED, "reason": reason})

    def pause(self) -> None:
        """Records that the run was interrupted, and so the time since the last event."""
        self._append({"event": EVENT_PAUSED})

    def _append(self, event: dict[str, Any]) -> None:
        now = self._clock()
        event = {**event, "elapsed_s": round(max(0.0, now - self._last_event_s), 3)}
        if self._time_of_day is not None:
            event["time_s"] = round(self._time_of_day(), 3)
        self._last_event_s = now
        self._journal.append(encode(event))
        self.decisions.apply(event)
