"""A run, as the fold of its journal: trials, outcomes, the best one, why it stopped.

All that a person looks at is drawn from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dsat.memory.predictor import Basis
from dsat.space.plan import Plan
from dsat.values.outcome import ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import Trial, TrialKind

EVENT_START = "start"
EVENT_PROPOSED = "proposed"
EVENT_WAITING = "waiting"
EVENT_FINISHED = "finished"
EVENT_STOPPED = "stopped"
EVENT_BUDGET = "budget"
EVENT_FORESEEN = "foreseen"

HOPELESS_AFTER = 4


class Run:
    """A pure function of the events applied so far.

    Attributes:
        plan: None until the first event.
        info: what the journal's first line says for people (name, versions, machine).
        trials, outcomes: by trial id, in the order of the events.
        baseline: the trial of the user's own configuration.
        best: the trial with the best value so far among those that keep to the plan.
        foreseen: what the memory model begins with.
        skipped: names of configurations that were not launched since they would not have fitted.
        stop_reason: None while the run goes on or after it was interrupted.
        running_s: wall time between the first and the last event, pauses left out.
        ended_s: that time when a trial ended, by trial id.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.plan: Plan | None = None
        self.info: Mapping[str, Any] = {}
        self.trials: dict[int, Trial] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.baseline: Trial | None = None
        self._running: dict[int, Trial] = {}
        self._profiled: Outcome | None = None
        self._failures = 0
        self._hopeful = False
        self.best: Trial | None = None
        self.foreseen: Basis | None = None
        self.skipped: list[str] = []
        self.stop_reason: str | None = None
        self.trials_since_best = 0
        self.running_s = 0.0
        self.ended_s: dict[int, float] = {}
        for event in events:
            self.apply(event)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Folds one event in; a kind that is not known is skipped."""
        kind = event["event"]
        self.running_s += event.get("elapsed_s", 0.0)
        self.skipped += event.get("skipped", [])
        if kind == EVENT_START:
            self.plan = Plan.from_json(event["plan"])
            self.info = event["info"]
        elif kind == EVENT_PROPOSED:
            trial = Trial.from_json(event["trial"])
            self.trials[trial.id] = self._running[trial.id] = trial
            if trial.kind is TrialKind.BASELINE:
                self.baseline = trial
            self.stop_reason = None
        elif kind == EVENT_FINISHED:
            self._finish(event["trial_id"], Outcome.from_json(event["outcome"]))
        elif kind == EVENT_FORESEEN:
            self.foreseen = Basis.from_json(event["basis"])
        elif kind == EVENT_BUDGET:
            assert self.plan is not None
            self.plan = replace(self.plan, max_trials=event["max_trials"])
            self.stop_reason = None
        elif kind == EVENT_STOPPED:
            self.stop_reason = event["reason"]

    def _finish(self, trial_id: int, outcome: Outcome) -> None:
        assert self.plan is not None
        self.outcomes[trial_id] = outcome
        self.ended_s[trial_id] = self.running_s
        trial = self.trials[trial_id]
        self._running.pop(trial_id, None)
        value = outcome.value(self.plan.objective)
        if trial.kind is TrialKind.PROFILE:
            self._profiled = outcome
            return
        if outcome.kind in (OutcomeKind.ERROR, OutcomeKind.INVALID):
            self._failures += not outcome.smaller_may_run
        else:
            self._hopeful = True
        if (
            value is not None
            and self.plan.admits(trial.batch)
            and self.plan.objective.is_better(value, self.best_value)
        ):
            self.best = trial
            self.trials_since_best = 0
        else:
            self.trials_since_best += 1

    @property
    def best_value(self) -> float | None:
        return None if self.best is None else self.value(self.best)

    @property
    def profile(self) -> ModelProfile | None:
        """What the profile trial found, once it ran."""
        return None if self._profiled is None else self._profiled.profile

    @property
    def hopeless(self) -> bool:
        """Whether the first few trials all failed in a way that no other configuration mends."""
        return self._failures >= HOPELESS_AFTER and not self._hopeful

    @property
    def running(self) -> list[Trial]:
        """Trials that were proposed and have no outcome."""
        return list(self._running.values())

    def value(self, trial: Trial) -> float | None:
        """The objective's value of a trial; None unless it ran."""
        assert self.plan is not None
        outcome = self.outcomes.get(trial.id)
        return None if outcome is None else outcome.value(self.plan.objective)

    def count(self, kind: OutcomeKind) -> int:
        """How many trials ended so."""
        return sum(outcome.kind is kind for outcome in self.outcomes.values())
