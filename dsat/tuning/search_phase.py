"""Measures what a search proposes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from dsat.inputs.ds_config import BATCH_KEYS
from dsat.memory.forecast import Forecast
from dsat.memory.predictor import Basis
from dsat.search import SEARCHES
from dsat.search.base import Outlook
from dsat.space.overrides import overrides_for
from dsat.space.plan import Plan
from dsat.space.space import Space
from dsat.tuning.ramp import Ramp, halfway
from dsat.tuning.run import Run
from dsat.tuning.trial_costs import TrialCosts
from dsat.tuning.trial_factory import TrialFactory, name_of
from dsat.values.outcome import ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Proposal, Trial, TrialKind
from dsat.values.zero_strategy import of_config

# A smaller micro batch takes less; a search that learns this tries nothing larger.
_TOO_LONG = Outcome(OutcomeKind.TIMEOUT, message="predicted to take long", smaller_may_run=True)


class SearchPhase:
    """Proposals of a search, none of which is measured twice.

    A proposal that equals an earlier trial gets that one's outcome, at once or when it ends. One
    that is predicted to run out of memory takes no trial.

    Args:
        plan: what is tuned.
        run: the run so far, its model profiled.
        trials: makes its trials.
        space: what may be tried.
        basis: what memory is predicted from; None to predict none.

    Attributes:
        forecast: predicted memory, if it is predicted.
    """

    def __init__(
        self,
        plan: Plan,
        run: Run,
        trials: TrialFactory,
        space: Space,
        basis: Basis | None,
    ) -> None:
        own = run.baseline
        assert own is not None and run.profile is not None
        self._plan = plan
        self._run = run
        self._trials = trials
        self._space = space
        digest = trials.fingerprint(own.overrides, own.script_args)
        self._trial_by_config = {digest: own.id}
        self._proposals: dict[int, list[Proposal]] = {}  # by the trial that answers them
        self._settings_of: dict[int, Mapping[str, Any]] = {}  # of trials but the user's own
        self._skipped: list[str] = []
        self.forecast = None if basis is None else _forecast(basis, plan, run, space)
        searches = SEARCHES[plan.method]
        self._costs = TrialCosts(plan, run)
        self._ramp: Ramp | None = None
        if plan.ramp and searches.ramps:
            strategies, strategy = list(space.strategies), of_config(plan.base_config)
            is_searched = strategy in strategies
            branch = strategies.index(strategy) if is_searched else 0
            self._ramp = Ramp(run, space, branch, run.outcomes[own.id] if is_searched else None)
        self._search = searches(
            run.profile,
            plan.objective,
            space,
            seed=plan.seed,
            predict=None if self.forecast is None else self.forecast.largest,
            gated=self.forecast is not None,
            costs=self._costs,
            **plan.search_options,
        )
        self._suggested = list(_suggested(plan, run.profile, space))
        self._most_samples: int | None = None
        self._learn(own, run.outcomes[own.id])

    @property
    def stop_reason(self) -> str | None:
        """The reason to end the search although there may be more to try, or None."""
        since, patience = self._run.trials_since_best, self._search.patience
        if patience is not None and self._run.best is not None and since >= patience:
            return f"no better configuration in the last {since} trials"
        return self._search.stop_reason

    @property
    def outlook(self) -> Outlook | None:
        """Prediction for the next proposal."""
        return self._search.outlook

    def predicted(self, trial: Trial) -> float | None:
        """The logarithm of the value that the search's model predicts; see `Search.predicted`."""
        return self._search.predicted(self._settings_of[trial.id], trial.batch.micro_batch)

    def next_trial(self) -> Trial | None:
        """Return the trial to start next, which counts as started; None to wait for an outcome."""
        if self._ramp is not None:
            return self._next_of_ramp(self._ramp)
        return self._next_of_search()

    def _next_of_ramp(self, ramp: Ramp) -> Trial | None:
        """A step of the ramp, which is alone: what comes after it depends on it."""
        if self._run.running:
            return None
        micro_batch = ramp.ask()
        settings = self._space.branches[ramp.branch].settings(0)
        trial = None if micro_batch is None else self._unasked(settings, micro_batch)
        if trial is not None:
            return trial
        self._end_ramp(ramp)
        return self._next_of_search()

    def _end_ramp(self, ramp: Ramp) -> None:
        self._ramp = None
        if ramp.limit is not None:
            self._search.limit(ramp.limit)

    def _next_of_search(self) -> Trial | None:
        while self._suggested:
            trial = self._unasked(*self._suggested.pop(0))
            if trial is not None:
                return trial
        while (proposal := self._search.ask()) is not None:
            trial = self._try(proposal)
            if trial is not None:
                return trial
        may_go_on = self._plan.ramp and self._search.ramps and not self._run.running
        return self._next_beside_the_best() if may_go_on else None

    def _next_beside_the_best(self) -> Trial | None:
        """More micro batches of the best settings, once the search has nothing new to try."""
        leader = self._run.leader
        if leader is None or leader.id not in self._settings_of:
            return None
        settings, best = self._settings_of[leader.id], leader.batch.micro_batch
        tried = {
            self._run.trials[trial_id].batch.micro_batch
            for trial_id, its in self._settings_of.items()
            if its == settings
        }
        for size in halfway(best, tried, self._space.micro_batches):
            trial = self._unasked(settings, size)
            if trial is not None:
                return trial
        return None

    def _unasked(self, settings: Mapping[str, Any], micro_batch: int) -> Trial | None:
        """A trial that no search proposed; None if it is known already or cannot fit."""
        batch = self._space.batch(micro_batch, settings)
        overrides, script_args = overrides_for(settings, batch), self._space.script_args(settings)
        if self._trials.fingerprint(overrides, script_args) in self._trial_by_config:
            return None
        if self.forecast is not None and not self.forecast.fits(overrides, script_args):
            self._skipped.append(name_of(self._trials.strategy(overrides), batch))
            return None
        if self._takes_too_long(overrides, batch):
            return None
        trial = self._trial(overrides, batch, script_args)
        self._settings_of[trial.id] = settings
        return trial

    def update(self, trial: Trial, outcome: Outcome) -> None:
        """Process the outcome of a trial of this phase, which the run holds already."""
        if self.forecast is not None:
            self.forecast.learn(trial.overrides, trial.script_args, outcome)
        self._learn(trial, outcome)

    def _learn(self, trial: Trial, outcome: Outcome) -> None:
        """Has the search and the ramp take in what came of a trial."""
        self._costs.update(trial, outcome)
        if outcome.metrics is not None and self._run.noise is not None:
            # Earlier finals have shown how much one run differs from the next.
            metrics = outcome.metrics.at_least_as_uncertain(self._run.noise)
            outcome = replace(outcome, metrics=metrics)
        self._limit_to_data()
        if self._ramp is not None and trial.kind is not TrialKind.BASELINE:
            self._ramp.update(trial.batch.micro_batch, outcome)
        proposals = self._proposals.pop(trial.id, [])
        for proposal in proposals:
            self._search.tell(proposal, outcome)
        if not proposals:
            self._tell_unasked(trial, outcome)

    def _limit_to_data(self) -> None:
        """Limit the search once to the samples that the data set provides."""
        if self._run.most_samples not in (None, self._most_samples):
            self._most_samples = self._run.most_samples
            self._search.limit(self._run.most_samples)

    def take_skipped(self) -> list[str]:
        """Return, once, the names of new proposals that were predicted not to fit."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def _try(self, proposal: Proposal) -> Trial | None:
        """A trial for a proposal, unless its outcome is known or will be."""
        batch = self._space.batch(proposal.micro_batch, proposal.settings)
        overrides = overrides_for(proposal.settings, batch)
        script_args = self._space.script_args(proposal.settings)
        known = self._trial_by_config.get(self._trials.fingerprint(overrides, script_args))
        if known is not None and known in self._run.outcomes:
            self._search.tell(proposal, self._run.outcomes[known])
        elif known is not None:
            self._proposals.setdefault(known, []).append(proposal)
        elif self.forecast is not None and not self.forecast.fits(overrides, script_args):
            self._skipped.append(name_of(self._trials.strategy(overrides), batch))
            self._search.tell(proposal, Outcome(OutcomeKind.OOM, message="predicted not to fit"))
        elif not self._search.weighs_costs and self._takes_too_long(overrides, batch):
            self._search.tell(proposal, _TOO_LONG)
        else:
            trial = self._trial(overrides, batch, script_args, proposal)
            self._proposals[trial.id] = [proposal]
            self._settings_of[trial.id] = proposal.settings
            return trial
        return None

    def _takes_too_long(self, overrides: Mapping[str, Any], batch: BatchTriple) -> bool:
        """Check if a trial is predicted to exceed the time limit, from other trials."""
        step_s = self._costs.step_s(self._trials.strategy(overrides), batch)
        return bool(self._costs.are_too_long(step_s))

    def _trial(
        self,
        overrides: Mapping[str, Any],
        batch: BatchTriple,
        script_args: Mapping[str, Any],
        proposal: Proposal | None = None,
    ) -> Trial:
        predicted_bytes = None
        if self.forecast is not None:
            predicted_bytes = self.forecast.predicted_bytes(overrides, script_args)
        trial = self._trials.make(
            TrialKind.SEARCH,
            overrides,
            batch,
            script_args,
            proposal=proposal,
            predicted_bytes=predicted_bytes,
        )
        self._trial_by_config[self._trials.fingerprint(overrides, script_args)] = trial.id
        return trial

    def _tell_unasked(self, trial: Trial, outcome: Outcome) -> None:
        """Pass the outcome of the user's own configuration to the search.

        It is one of the space if it has the first settings of a branch, and batch sizes that the
        plan admits: the other settings are not looked at, for there may be millions.
        """
        found = None
        if self._plan.admits(trial.batch):
            found = self._branch_of(trial.overrides, trial.script_args, trial.batch.micro_batch)
        self._search.learn(found, trial.batch.micro_batch, outcome)

    def _branch_of(
        self, overrides: Mapping[str, Any], script_args: Mapping[str, Any], micro_batch: int
    ) -> int | None:
        """The number of the branch whose first settings a configuration has, if any."""
        fingerprint = partial(self._trials.fingerprint, num_params=self._space.num_params)
        digest = fingerprint(overrides, script_args)
        found = None
        for number, branch in enumerate(self._space.branches):
            settings = branch.settings(0)
            batch = self._space.batch(micro_batch, settings)
            script = self._space.script_args(settings)
            if fingerprint(overrides_for(settings, batch), script) == digest:
                found = number
        return found


def _suggested(
    plan: Plan, profile: ModelProfile, space: Space
) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Yield settings and micro batches of the space that were the best for others.

    Of a setting that is not searched here, or has other values, the first value is taken.
    """
    for each in plan.suggested:
        model = (each.num_params, each.trainable_params)
        branch = next((b for b in space.branches if b.strategy.name == each.strategy), None)
        own = each.config.get(BATCH_KEYS[1])
        sizes = [size for size in space.micro_batches if isinstance(own, int) and size <= own]
        if model != (profile.num_params, profile.trainable_params) or branch is None or not sizes:
            continue
        known = {key.removeprefix("zero_optimization."): v for key, v in each.config.items()}
        known |= each.switches
        chosen = {key: known[key] for key, values in branch.knobs if known.get(key) in values}
        yield {**branch.settings(0), **chosen}, sizes[-1]


def _forecast(basis: Basis, plan: Plan, run: Run, space: Space) -> Forecast | None:
    """Predicted memory, calibrated by the trials so far.

    None if it says that nothing fits: the model was profiled, so that cannot be true.
    """
    assert run.profile is not None
    forecast = Forecast(basis, plan, run.profile, space)
    for trial_id, outcome in run.outcomes.items():
        trial = run.trials[trial_id]
        forecast.learn(trial.overrides, trial.script_args, outcome)
    smallest = space.micro_batches[0]
    if any(forecast.largest(branch.settings(0)) >= smallest for branch in space.branches):
        return forecast
    return None
