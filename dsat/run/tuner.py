"""The tuner: every decision and every outcome passes through the journal.

The journal is the only I/O here. So the same class works with an engine, which is polled, and with
a cluster, which sends events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsat.errors import JournalMismatch
from dsat.memory.predictor import Basis
from dsat.run import events as journaled
from dsat.run.decisions import BeginFinals, Decisions
from dsat.run.history import Measured
from dsat.run.journal import SCHEMA_VERSION, Journal, MemoryJournal
from dsat.run.run import Run
from dsat.search import usual_options
from dsat.space.plan import Plan
from dsat.values.codec import encode
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial


class Tuner:
    """Tuner of a run: decides on the user's own configuration, the search and the finals.

    A decision is returned, and an outcome affects decisions, only after it is in the journal.

    Args:
        plan: what to tune. It must agree with the plan in the journal; see `Plan.difference`.
        journal: the journal; if it has events, their run is continued.
        info: names, versions and machine, for the first line of a new journal.
        earlier: trials of earlier runs whose measurements may be reused.
        clock: monotonic clock in seconds, for displayed durations only.
        last_event_s: time of the last event, or of the command's start, by `clock`; by default the
            present time.

    Raises:
        JournalMismatch: the plan in the journal is different.
        JournalError: an event is damaged, or contradicts earlier ones.
    """

    def __init__(
        self,
        plan: Plan,
        journal: Journal | MemoryJournal,
        *,
        info: Mapping[str, Any] | None = None,
        earlier: Sequence[Measured] = (),
        clock: Callable[[], float] = time.monotonic,
        last_event_s: float | None = None,
    ) -> None:
        self.plan = _update_plan(plan, journal.events)
        self.decisions = Decisions(self.plan)
        self._journal = journal
        self._earlier = earlier
        self._clock = clock
        self._last_event_s = clock() if last_event_s is None else last_event_s
        journaled.replay(journal.events, self.decisions.apply)
        self._continue(plan, info or {})

    def _continue(self, plan: Plan, info: Mapping[str, Any]) -> None:
        if not self.run.has_begun:
            start = {"event": journaled.EVENT_START, "schema": SCHEMA_VERSION}
            self._append({**start, "plan": self.plan, "info": dict(info)})
            return
        current = {name: getattr(self.run.plan, name) for name in journaled.OF_A_BUDGET}
        requested = {name: getattr(plan, name) for name in journaled.OF_A_BUDGET}
        # If the new budget is used up, no trial follows: such a command trains with the result.
        is_used = self.run.best is not None and len(self.run.outcomes) >= plan.max_trials
        if current != requested and not is_used:
            self._append({"event": journaled.EVENT_BUDGET, **requested})

    @property
    def run(self) -> Run:
        return self.decisions.run

    def next_trials(self, free_slots: int) -> list[Trial]:
        """Return the trials to start now on the free devices; some devices may stay free."""
        self._reuse_earlier()
        trials: list[Trial] = []
        while free_slots >= self.plan.slots_per_trial:
            step = self.decisions.next_step()
            if isinstance(step, BeginFinals):
                self._append(step.event)
            elif isinstance(step, Trial):
                self._append({"event": journaled.EVENT_PROPOSED, "trial": step})
                trials.append(step)
                free_slots -= self.plan.slots_per_trial
            else:
                break
        return trials

    def _reuse_earlier(self) -> None:
        """Record trials that earlier runs have measured, instead of running them."""
        while self._earlier:
            is_last = self.decisions.search_began
            reused = False
            for trial, measured in self.decisions.find_reusable(self._earlier):
                event = {"event": journaled.EVENT_EARLIER, "trial": trial}
                event |= {"outcome": measured.outcome, "neighbours": measured.neighbours}
                self._append(event)
                reused = True
            if is_last:
                self._earlier = ()
            elif not reused:
                return

    @property
    def finished(self) -> bool:
        """Return whether no trial is running and no further one will start."""
        return not self.run.running and self.decisions.stop_reason is not None

    def record(self, trial_id: int, outcome: Outcome) -> None:
        """Record the outcome of a trial; ignore a second outcome of the same trial."""
        assert trial_id in self.run.trials, trial_id
        if trial_id not in self.run.outcomes:
            event = {"event": journaled.EVENT_FINISHED, "trial_id": trial_id}
            self._append({**event, "outcome": outcome})

    def set_memory_basis(self, basis: Basis) -> None:
        """Record the basis of memory predictions, for which the search waits."""
        assert self.decisions.needs_memory_basis
        self._append({"event": journaled.EVENT_MEMORY_BASIS, "basis": basis})

    def stop(self) -> None:
        """Record why the run is over."""
        assert self.finished
        reason = self.decisions.stop_reason
        if self.run.stop_reason != reason:
            self._append({"event": journaled.EVENT_STOPPED, "reason": reason})

    def pause(self) -> None:
        """Record that the run was interrupted."""
        self._append({"event": journaled.EVENT_PAUSED})

    def _append(self, event: Mapping[str, Any]) -> None:
        """Write an event, then apply it."""
        now = self._clock()
        elapsed_s = round(max(0.0, now - self._last_event_s), 3)
        event = {**event, "elapsed_s": elapsed_s, "time_s": round(time.time(), 3)}
        self._last_event_s = now
        self._journal.append(encode(event))
        self.decisions.apply(event)


def difference_to(plan: Plan, earlier: Plan) -> str | None:
    """Return the first difference between a plan and an earlier run's plan, or None.

    If the earlier run did not record an option of the search, the option's default is assumed.
    Defaults of DeepSpeed that only one of the plans records are not compared.
    """
    options = {**usual_options(earlier.method), **earlier.search_options}
    defaults = {path: plan.defaults.get(path, was) for path, was in earlier.defaults.items()}
    compared = replace(plan, defaults=defaults)
    return compared.difference(replace(earlier, search_options=options))


def _update_plan(plan: Plan, events: Sequence[Mapping[str, Any]]) -> Plan:
    """Return the plan in a journal, with the budget, finals and faulty stages of the new plan.

    Raises:
        JournalMismatch: the plans differ in another field; see `Plan.difference`.
    """
    if not events:
        return plan
    plans: list[Plan] = []
    journaled.replay(events[:1], lambda event: plans.append(event["plan"]))
    [earlier] = plans
    difference = difference_to(plan, earlier)
    if difference is not None:
        raise JournalMismatch(
            f"Cannot resume: {difference}. Resume with the options and files that the run was "
            "started with, or start a new run."
        )
    new = (*journaled.OF_A_BUDGET, "faulty_stages")
    return replace(earlier, **{name: getattr(plan, name) for name in new})
