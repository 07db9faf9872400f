"""The decisions of a run: which phase it is in, which trial comes next, when it is over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsat.memory.forecast import Forecast
from dsat.memory.predictor import Basis
from dsat.run import finals, finals_phase
from dsat.run.events import EVENT_EARLIER, EVENT_FINISHED, budget_reason
from dsat.run.history import Measured
from dsat.run.profile_phase import ProfilePhase
from dsat.run.run import Run
from dsat.run.search_phase import SearchPhase
from dsat.run.trial_factory import SEARCHED, count_finals, make_trial
from dsat.search.base import Stop, Wait
from dsat.space.overrides import overrides_for
from dsat.space.plan import BY_FORMULA, NO_MEMORY_MODEL, Plan
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import Trial, TrialKind

# Without finals, the user's own configuration is repeated after `_REPEAT_AFTER` trials, if the run
# has at least `_LEAST_RUN_WITH_REPEAT`. Otherwise, noise makes too many searches recommend another
# configuration. With nothing to gain, 26 % of `asha` searches of 14 trials do so if runs vary by
# 10 %, and 59 % if by 20 %. With the repeat, 11 % and 20 % do. If runs vary by up to 5 %, at most
# 5 % do, with or without the repeat (`benchmarks/winners_curse.py`, 200 seeds).
_REPEAT_AFTER, _LEAST_RUN_WITH_REPEAT = 5, 12
_HOPELESS_AFTER = 4  # a search ends after this many failures if all trials failed


@dataclass(frozen=True)
class BeginFinals:
    """Decision to begin the finals, with the event to journal."""

    event: Mapping[str, Any]


Step = Trial | BeginFinals | Wait | Stop


class Decisions:
    """Choice of a run's next step: the user's own configuration, then the search, then the finals.

    Decisions depend on the state of the run alone. A resumed run applies the decisions that its
    journal contains, instead of making them again.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.run = Run()
        self._profiling = ProfilePhase(plan, self.run)
        self._searching: SearchPhase | None = None
        self._next: Step | None = None

    def apply(self, event: Mapping[str, Any]) -> None:
        self._next, flags = None, self.run.batch_flag.names
        self.run.apply(event)
        if event["event"] not in (EVENT_EARLIER, EVENT_FINISHED):
            return
        outcome = event["outcome"]
        trial = event["trial"] if "trial" in event else self.run.trials[event["trial_id"]]
        if trial.profiles:
            self._profiling.update(trial, outcome)
        is_other = self.run.batch_flag.names != flags
        if is_other or outcome.fixed_batch is not None or outcome.batch_flag:
            self._searching = None  # rebuild it with other micro batches or flag

    def find_reusable(self, earlier: Sequence[Measured]) -> Iterator[tuple[Trial, Measured]]:
        """Yield new trials that need not run, each with its measurement in an earlier run.

        Until the model is profiled, this is at most the next trial. During the search, it may be
        any configuration of the space. The caller must record each trial before requesting another.
        """
        search = self._search
        if search is not None:
            yield from search.find_reusable(earlier)
        elif not self._profiling.over and (due := self._profiling.next_trial()) is not None:
            due_digest = self.plan.fingerprint(due.overrides, due.script_args)
            for measured in earlier:
                trial, outcome = measured.trial, measured.outcome
                profiles = trial.profiles and (outcome.profile is not None or not outcome.ok)
                digest = self.plan.fingerprint(trial.overrides, trial.script_args)
                if profiles and digest == due_digest:
                    yield due, measured
                    return

    def next_step(self) -> Step:
        """Return the next step; it stays the same until an event is applied."""
        if self._next is None:
            self._next = self._decide()
        return self._next

    def _decide(self) -> Step:
        run = self.run
        if run.finals is not None and not run.is_reopened:
            return self._continue_finals(run.finals, str(run.search_ended))
        if self.failure is not None:
            return Stop(self.failure)
        search = self._search
        if search is None:
            trial = self._profiling.next_trial()
            if trial is not None and len(run.trials) >= run.plan.max_trials:
                return self._stop_for_budget
            return trial or Wait()
        step = self._continue_search(search)
        if isinstance(step, Wait) and not run.running:
            step = Stop("the search waits, but no trial is running")
        if not isinstance(step, Stop) or run.running:
            return step
        if run.finals is not None:
            return self._continue_finals(run.finals, step.reason)
        # `propose` also fits the search's model, which `predicted` needs after a resumption.
        converged = not self._is_budget_used
        if not converged and isinstance(stop := search.propose(), Stop):
            step, converged = stop, True  # a larger budget would not continue the search
        event = finals_phase.begin(run, step.reason, search.predicted)
        return step if event is None else BeginFinals({**event, "converged": converged})

    def _continue_finals(self, begun: finals.Finals, reason: str) -> Trial | Wait | Stop:
        is_over = begun.over or self.plan.finals == 0  # a resumed run may do without them
        return Stop(reason) if is_over else finals_phase.next_trial(self.run) or Wait()

    def _continue_search(self, search: SearchPhase) -> Trial | Wait | Stop:
        if self._is_budget_used:
            return self._stop_for_budget
        if _is_hopeless(self.run):
            return Stop("every trial failed, and none ran out of memory")
        if self.run.repeat is not None and self.run.repeat.id not in self.run.outcomes:
            return Wait()  # the repeat must run alone, as the first trial did
        step = search.propose()
        due = self._due_repeat
        if due is None or not isinstance(step, Trial):
            return step
        if self.run.running:
            return Wait()
        return make_trial(self.run, TrialKind.REPEAT, due.overrides, due.batch, due.script_args)

    @property
    def _due_repeat(self) -> Trial | None:
        """First trial of the user's own configuration if it must be repeated now, else None."""
        run, first = self.run, self.run.baseline
        if first is None or run.value(first) is None or run.repeat is not None or self._reserved:
            return None
        is_early = len(run.trials) - len(run.earlier) >= _REPEAT_AFTER or first.id in run.earlier
        is_long = run.plan.max_trials >= _LEAST_RUN_WITH_REPEAT
        return first if is_long and is_early else None

    @property
    def _is_budget_used(self) -> bool:
        """Return whether all remaining trials are reserved for finals.

        If the user's own configuration was not measured, or if all trials of the search failed, no
        finals can follow, so no trials are reserved.
        """
        run, trials = self.run, self.run.trials.values()
        searched = [run.outcomes.get(t.id) for t in trials if t.kind is TrialKind.SEARCH]
        all_failed = bool(searched) and not any(o is None or o.ok for o in searched)
        has_finals = run.value(run.baseline) is not None and not all_failed
        return len(run.trials) >= run.plan.max_trials - (self._reserved if has_finals else 0)

    @property
    def _stop_for_budget(self) -> Stop:
        return Stop(budget_reason(self.run.plan.max_trials))

    @property
    def _reserved(self) -> int:
        most = self.run.plan.max_trials - count_finals(self.run)
        reserved = finals.reserved(most, self.plan.finals)
        # A resumed search leaves at least a pair of finals.
        return min(reserved, finals.PAIR) if self.run.is_reopened else reserved

    @property
    def _search(self) -> SearchPhase | None:
        """The search, created at its first use; None before it begins."""
        if self._searching is None and self.search_began:
            basis = self.run.memory_basis
            if self.plan.memory_model == BY_FORMULA:
                assert self.run.profile is not None
                basis = Basis.of_profile(self.run.profile, self.plan.switches)
            plan = self._plan_of_search
            space = self._profiling.make_space(plan)
            self._searching = SearchPhase(plan, self.run, space, basis)
        return self._searching

    @property
    def _plan_of_search(self) -> Plan:
        """The plan, limited to the script's own micro batch if trials cannot change it."""
        outcomes = self.run.outcomes.values()
        fixed = next((outcome.fixed_batch for outcome in outcomes if outcome.fixed_batch), None)
        if fixed is None or self.run.batch_flag.name:
            return self.plan
        limited = replace(self.plan, min_micro_batch=fixed, max_micro_batch=fixed)
        return limited if limited.allowed_micro_batches else self.plan

    @property
    def stop_reason(self) -> str | None:
        """The reason why no further trial starts; None if one may start."""
        step = self.next_step()
        return step.reason if isinstance(step, Stop) else None

    @property
    def failure(self) -> str | None:
        return self._profiling.failure

    @property
    def needs_memory_basis(self) -> bool:
        """Return whether the search must wait for simulated memory (`Tuner.set_memory_basis`)."""
        is_unsimulated = self.plan.memory_model in (BY_FORMULA, NO_MEMORY_MODEL)
        return self._profiling.over and not is_unsimulated and self.run.memory_basis is None

    @property
    def search_began(self) -> bool:
        return self._profiling.over and not self.needs_memory_basis

    @property
    def forecast(self) -> Forecast | None:
        """Memory predictions; None before the search begins, or if it has no predictions."""
        search = self._search
        return None if search is None else search.forecast

    def reference_configs(self) -> list[dict[str, Any]]:
        """Return one configuration for each searched strategy and parallelism, for simulations."""
        space, configs = self._profiling.make_space(self.plan), []
        for branch in space.branches:
            for settings in branch.list_parallelisms():
                batch = space.batch(space.micro_batches[0], settings)
                configs.append(self.plan.config(overrides_for(settings, batch)))
        return configs


def _is_hopeless(run: Run) -> bool:
    """Return whether all trials ended in errors that other configurations are likely to have too.

    At least `_HOPELESS_AFTER` of them must be errors that no smaller micro batch could avoid.
    """
    searched = [o for i, o in run.outcomes.items() if run.trials[i].kind in SEARCHED]
    failed = [o for o in searched if o.kind in (OutcomeKind.ERROR, OutcomeKind.INVALID)]
    final = sum(not outcome.smaller_may_run for outcome in failed)
    return len(failed) == len(searched) and final >= _HOPELESS_AFTER
