"""The decisions of a run: which phase it is in, which trial comes next, when it is over.

They follow from the events alone, so that a run is resumed by applying its events again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsat.inputs.settings import BY_FORMULA, NO_MEMORY_MODEL
from dsat.memory.forecast import Forecast
from dsat.memory.predictor import Basis
from dsat.search.base import Outlook
from dsat.space.overrides import overrides_for
from dsat.space.plan import Plan
from dsat.tuning import finals
from dsat.tuning.events import EVENT_FINALS, EVENT_FINISHED, EVENT_PROPOSED, EVENT_WAITING
from dsat.tuning.finals_phase import FinalsPhase
from dsat.tuning.profile_phase import ProfilePhase
from dsat.tuning.run import Run
from dsat.tuning.search_phase import SearchPhase
from dsat.tuning.trial_factory import TrialFactory
from dsat.values.trial import Trial


class Decisions:
    """Decides the trials of a run phase by phase: the model profile, the search, the finals.

    Attributes:
        run: the fold of all events applied so far.
        converged: the finals began although there might have been more trials.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.run = Run()
        self._trials = TrialFactory(plan, self.run)
        self._profiling = ProfilePhase(plan, self._trials)
        self._searching: SearchPhase | None = None
        self._finals = FinalsPhase(plan, self.run, self._trials)
        self.converged = False
        self._waiting = False  # the search had nothing to try, and nothing was heard since

    def next_event(self, *, ignore_budget: bool = False) -> dict[str, Any] | None:
        """Return the next event, which must be applied before the next call.

        Args:
            ignore_budget: there may be one trial more than planned.

        Returns:
            A trial proposed, that there is nothing to try now, or that the finals begin; None if
            nothing is decided before another event.
        """
        if self.run.stop_asked:
            return None
        if self.run.finals is not None:
            trial = self._finals.next_trial()
            return None if trial is None else _proposed(trial)
        search = self._search
        if search is None:
            trial = self._profiling.next_trial()
            return None if trial is None else _proposed(trial)
        if self._search_over(ignore_budget=ignore_budget) is not None:
            return self._next_finals()
        if self._waiting:
            return None
        trial = search.next_trial()
        self._waiting = trial is None
        event = {"event": EVENT_WAITING} if trial is None else _proposed(trial)
        skipped = search.take_skipped()
        return {**event, "skipped": skipped} if skipped else event

    def apply(self, event: Mapping[str, Any]) -> None:
        """Apply an event.

        The phase of a trial takes its outcome in at once: what it learns depends on the run as of
        then, which later events change.
        """
        if event["event"] == EVENT_FINALS:
            self.converged = self._search_over(ignore_budget=True) is not None
        self.run.apply(event)
        if event["event"] == EVENT_FINISHED:
            self._waiting = False
            trial = self.run.trials[event["trial_id"]]
            phase = self._profiling if trial.profiles else self._searching
            assert phase is not None
            phase.update(trial, self.run.outcomes[trial.id])

    @property
    def stop_reason(self) -> str | None:
        """The reason that no further trial starts, or None."""
        if self.run.stop_asked:
            return "it was asked to stop"
        if self.run.finals is not None:
            return self.run.search_ended if self.run.finals.over else None
        return None if self._next_finals() else self._search_over(ignore_budget=False)

    @property
    def failure(self) -> str | None:
        """The reason that the model could not be profiled, or None."""
        return self._profiling.failure

    @property
    def needs_memory_basis(self) -> bool:
        """True while the run waits for the basis of memory predictions."""
        by_itself = self.plan.memory_model in (BY_FORMULA, NO_MEMORY_MODEL)
        return self._profiling.over and not by_itself and self.run.memory_basis is None

    @property
    def search_began(self) -> bool:
        """True from the beginning of the search on."""
        return self._profiling.over and not self.needs_memory_basis

    @property
    def forecast(self) -> Forecast | None:
        """Predicted memory, if it is predicted, from when the search begins."""
        search = self._search
        return None if search is None else search.forecast

    @property
    def outlook(self) -> Outlook | None:
        """Prediction for the next proposal; None if the search makes none."""
        return None if self._searching is None else self._searching.outlook

    @property
    def _search(self) -> SearchPhase | None:
        """The search, made at its first use."""
        if self._searching is None and self.search_began:
            self._searching = SearchPhase(
                self.plan,
                self.run,
                self._trials,
                self._profiling.space,
                self._basis,
            )
        return self._searching

    @property
    def _basis(self) -> Basis | None:
        if self.plan.memory_model == BY_FORMULA:
            assert self.run.profile is not None
            return Basis.of_profile(self.run.profile, self.plan.switches)
        return self.run.memory_basis

    def reference_configs(self) -> list[dict[str, Any]]:
        """Return the first configuration of each searched strategy and parallelism."""
        space, configs = self._profiling.space, []
        for branch in space.branches:
            for settings in branch.of_each_parallelism():
                batch = space.batch(space.micro_batches[0], settings)
                overrides = overrides_for(settings, batch)
                configs.append(self.plan.config(overrides))
        return configs

    def _next_finals(self) -> dict[str, Any] | None:
        """Return the event that begins the finals, if the search is over and there is a choice."""
        reason = self._search_over(ignore_budget=False)
        if reason is None or self.failure is not None or self.run.running:
            return None
        search = self._search
        return None if search is None else self._finals.begin(reason, search.predicted)

    def _search_over(self, *, ignore_budget: bool) -> str | None:
        """Return the reason that the search starts no more trials; None while it may."""
        if self.failure is not None:
            return self.failure
        most = self.run.plan.max_trials
        for_search = most - finals.reserved(most - self.run.num_finals, self.plan.finals)
        if not ignore_budget and len(self.run.trials) >= for_search:
            return f"the budget of {most} trials is used"
        search = self._search
        if search is not None and search.stop_reason is not None:
            return search.stop_reason
        if self.run.hopeless:
            return "every trial failed, and none ran out of memory"
        if self._waiting and not self.run.running:
            return "every configuration was tried"
        return None


def _proposed(trial: Trial) -> dict[str, Any]:
    return {"event": EVENT_PROPOSED, "trial": trial}
