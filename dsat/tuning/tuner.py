"""The only decision loop: which trial next, what an outcome means, when to stop.

A state machine without I/O but the journal's, so that the same object serves an engine that is
polled and a cluster that sends events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from dsat.errors import JournalMismatch
from dsat.inputs import ds_config
from dsat.inputs.settings import BY_FORMULA, NO_MEMORY_MODEL
from dsat.memory.forecast import Forecast
from dsat.memory.predictor import Basis
from dsat.search import SEARCHES, Search
from dsat.space.overrides import overrides_for, script_args_for, strategy_settings
from dsat.space.plan import Plan
from dsat.space.space import Space, defaults, smallest_buckets
from dsat.tuning import strategies
from dsat.tuning.journal import SCHEMA_VERSION
from dsat.tuning.run import (
    EVENT_BUDGET,
    EVENT_FINISHED,
    EVENT_FORESEEN,
    EVENT_PROPOSED,
    EVENT_START,
    EVENT_STOPPED,
    EVENT_WAITING,
    Run,
)
from dsat.values.objective import KNOWN_TO_CI95
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Proposal, Trial, TrialKind
from dsat.values.zero_strategy import Strategy, of_config


class EventSink(Protocol):
    """Where events are made durable; a `Journal`."""

    def append(self, event: Mapping[str, Any]) -> None: ...


class Tuner:
    """Decides the trials of a run: the profile, the user's own configuration, then the search.

    Every decision is appended to the journal before it is returned, and every outcome before the
    search hears of it. A tuner made from the events of an earlier one continues as if it were it.

    Args:
        plan: what to tune. Must agree with the plan in `events`, but for the number of trials.
        journal: takes new events.
        info: for people, into the journal's first line.
        events: those of an earlier tuner, to continue from.
        clock: seconds, monotonic; only to tell people how long things took.

    Raises:
        JournalMismatch: the events were decided by another program, plan or seed.
    """

    def __init__(
        self,
        plan: Plan,
        journal: EventSink,
        *,
        info: Mapping[str, Any] | None = None,
        events: list[dict[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self.run = Run()
        self._journal = journal
        self._clock = clock
        self._last_event_s = clock()
        self._space: Space | None = None
        self._search: Search | None = None
        self._forecast: Forecast | None = None
        self._failure: str | None = None
        self._rescue = strategies.rescue(plan)
        self._rung = -1  # of the ladder; -1: the user's own strategy
        self._next_profile: int | None = None  # its micro batch
        self._waiting = False  # the search had nothing to try, and nothing was told since
        self._proposals: dict[int, Proposal] = {}
        self._trial_by_config: dict[str, int] = {}
        self._twins: dict[int, list[Proposal]] = {}
        self._names: set[str] = set()
        self._skipped: list[str] = []  # since the last trial
        self._replaying = True
        for event in events or []:
            self._replay(event)
        self._replaying = False
        if self.run.plan is not None and self.run.plan.max_trials != plan.max_trials:
            self._append({"event": EVENT_BUDGET, "max_trials": plan.max_trials})
        if self.run.plan is None:
            self._append(
                {
                    "event": EVENT_START,
                    "schema": SCHEMA_VERSION,
                    "plan": plan.to_json(),
                    "info": dict(info or {}),
                }
            )

    # -- what a loop calls

    def next_trials(self, free_slots: int) -> list[Trial]:
        """Trials to start now, as many as there is room and something to try for."""
        trials: list[Trial] = []
        while free_slots >= self.plan.slots_per_trial:
            trial = self._decide()
            if trial is None:
                break
            self._append(self._with_skipped({"event": EVENT_PROPOSED, "trial": trial.to_json()}))
            trials.append(trial)
            free_slots -= self.plan.slots_per_trial
        return trials

    def record(self, trial_id: int, outcome: Outcome) -> None:
        """Enters what came of a trial; a second outcome of the same trial is ignored."""
        assert trial_id in self.run.trials, trial_id
        if trial_id in self.run.outcomes:
            return
        self._append({"event": EVENT_FINISHED, "trial_id": trial_id, "outcome": outcome.to_json()})
        self._hear(trial_id, outcome)

    @property
    def awaits_basis(self) -> bool:
        """Whether nothing more is decided before `foresee`."""
        return self._space is not None and self._search is None

    @property
    def forecast(self) -> Forecast | None:
        """Predicted memory, if it is predicted, from when the search begins."""
        return self._forecast

    @property
    def searches(self) -> bool:
        """Whether the search has begun."""
        return self._search is not None

    def foresee(self, basis: Basis) -> None:
        """Enters what memory is predicted from, and begins the search."""
        assert self.awaits_basis
        self._append({"event": EVENT_FORESEEN, "basis": basis.to_json()})
        self._begin_search(basis)

    def reference_configs(self) -> list[dict[str, Any]]:
        """Of each strategy that is searched its first configuration."""
        assert self._space is not None
        space, configs = self._space, []
        for branch in space.branches:
            settings = branch.settings(0)
            batch = space.batch(space.micro_batches[0], settings)
            overrides = overrides_for(settings, batch)
            configs.append(self.plan.config(overrides))
        return configs

    @property
    def stop_reason(self) -> str | None:
        """Why nothing more will be started, or None."""
        if self._failure is not None:
            return self._failure
        if len(self.run.trials) >= self.plan.max_trials:
            return f"all {self.plan.max_trials} trials are done"
        if self._search is not None:
            since, patience = self.run.trials_since_best, self._search.patience
            if patience is not None and self.run.best is not None and since >= patience:
                return f"no better configuration in the last {since} trials"
            if self._search.stop_reason is not None:
                return self._search.stop_reason
        if self.run.hopeless:
            return "every trial failed, and none for want of memory"
        if self._waiting and not self.run.running:
            return "nothing is left to try"
        return None

    @property
    def finished(self) -> bool:
        """Whether all is done and nothing runs."""
        return self.stop_reason is not None and not self.run.running

    @property
    def failed(self) -> bool:
        """Whether the profile trial ended the run."""
        return self._failure is not None

    def stop(self) -> None:
        """Records why the run is over."""
        reason = self.stop_reason
        assert reason is not None and not self.run.running
        if self.run.stop_reason != reason:
            self._append({"event": EVENT_STOPPED, "reason": reason})

    # -- decisions

    def _decide(self) -> Trial | None:
        """The next trial; None if there is none now. Changes the search, so each call counts."""
        if not self.run.trials:
            return self._profile_trial(self._smallest_micro_batch())
        if self._next_profile is not None:
            micro_batch, self._next_profile = self._next_profile, None
            return self._profile_trial(micro_batch)
        if self._search is None or self._waiting or self.stop_reason is not None:
            return None
        if self.run.baseline is None and self._rung < 0:
            own = self.plan.own_batch
            return self._trial(TrialKind.BASELINE, own.config(), own, self.plan.switches)
        trial = self._ask()
        if trial is None:
            self._waiting = True
            self._append(self._with_skipped({"event": EVENT_WAITING}))
        return trial

    def _ask(self) -> Trial | None:
        """A trial for the search's next proposal that was not tried before.

        A proposal that equals an earlier trial gets that one's outcome, at once or when it ends.
        """
        assert self._search is not None and self._space is not None
        while (proposal := self._search.ask()) is not None:
            batch = self._space.batch(proposal.micro_batch, proposal.settings)
            overrides = overrides_for(proposal.settings, batch)
            script_args = script_args_for(proposal.settings)
            known = self._trial_by_config.get(self._fingerprint(overrides, script_args))
            if known is None:
                if self._forecast is not None and not self._forecast.fits(overrides, script_args):
                    self._skip(proposal, overrides, batch)
                    continue
                trial = self._trial(TrialKind.SEARCH, overrides, batch, script_args, proposal)
                self._proposals[trial.id] = proposal
                return trial
            if known in self.run.outcomes:
                self._search.tell(proposal, self.run.outcomes[known])
            else:
                self._twins.setdefault(known, []).append(proposal)
        return None

    def _skip(self, proposal: Proposal, overrides: Mapping[str, Any], batch: BatchTriple) -> None:
        """Tells the search that a proposal would run out of memory; that takes no trial."""
        assert self._search is not None
        strategy = of_config(self.plan.config(overrides))
        self._skipped.append(_stem(strategy, batch))
        self._search.tell(proposal, Outcome(OutcomeKind.OOM, message="predicted not to fit"))

    def _hear(self, trial_id: int, outcome: Outcome) -> None:
        self._waiting = False
        trial = self.run.trials[trial_id]
        if trial.kind is TrialKind.PROFILE:
            self._take_profile(trial, outcome)
            return
        assert self._search is not None
        if self._forecast is not None:
            self._forecast.learn(trial.overrides, trial.script_args, outcome)
        own = [self._proposals.pop(trial_id)] if trial_id in self._proposals else []
        proposals = own + self._twins.pop(trial_id, [])
        for proposal in proposals:
            self._search.tell(proposal, outcome)
        if not proposals:
            self._tell_unasked(trial, outcome)

    def _tell_unasked(self, trial: Trial, outcome: Outcome) -> None:
        """Lets the search know of the user's own configuration.

        It is one of the space if it has the first settings of a branch: the others are not looked
        at, for there may be millions.
        """
        assert self._search is not None and self._space is not None
        digest = self._fingerprint(trial.overrides, trial.script_args)
        found = None
        for number, branch in enumerate(self._space.branches):
            settings = branch.settings(0)
            batch = self._space.batch(trial.batch.micro_batch, settings)
            script_args = script_args_for(settings)
            if self._fingerprint(overrides_for(settings, batch), script_args) == digest:
                found = number
        self._search.learn(found, trial.batch.micro_batch, outcome)

    def _take_profile(self, trial: Trial, outcome: Outcome) -> None:
        """Makes the space, and begins the search unless memory is to be simulated first."""
        profile = outcome.profile
        if not outcome.ok or profile is None:
            self._profile_failed(trial, outcome)
            return
        if self.plan.metric == "FLOPS_per_gpu" and not profile.flops_per_sample:
            self._failure = (
                "the profile trial failed: no FLOPs of the model could be counted (custom "
                "kernels?). Use --metric throughput"
            )
            return
        self._space = strategies.make_space(self.plan, profile, rung=self._rung)
        if self.plan.memory_model == BY_FORMULA:
            self._begin_search(Basis.of_profile(profile, self.plan.switches))
        elif self.plan.memory_model == NO_MEMORY_MODEL:
            self._begin_search(None)

    def _begin_search(self, basis: Basis | None) -> None:
        plan, run, space = self.plan, self.run, self._space
        assert run.profile is not None and space is not None
        forecast = None
        if basis is not None:
            forecast = Forecast(basis, plan, run.profile, space)
            for trial_id, outcome in run.outcomes.items():
                trial = run.trials[trial_id]
                forecast.learn(trial.overrides, trial.script_args, outcome)
            if not any(
                forecast.largest(branch.settings(0)) >= space.micro_batches[0]
                for branch in space.branches
            ):
                forecast = None  # the model was profiled, so this cannot be true
        self._forecast = forecast
        self._search = SEARCHES[plan.method](
            run.profile,
            plan.objective,
            space,
            seed=plan.seed,
            memory_model=basis is not None,
            predict=None if forecast is None else forecast.largest,
            gated=forecast is not None,
            **plan.search_options,
        )

    def _profile_failed(self, trial: Trial, outcome: Outcome) -> None:
        """Profiles again in another way, or ends the run."""
        smallest, own = self._smallest_micro_batch(), self.plan.own_batch.micro_batch
        if outcome.kind is OutcomeKind.ERROR and trial.batch.micro_batch == smallest != own:
            # Some models cannot train on so few samples (batch normalisation, say).
            self._next_profile = own
            return
        out_of_memory = outcome.kind in (OutcomeKind.OOM, OutcomeKind.HOST_OOM)
        on_the_ladder = self._rung >= 0 and outcome.kind is OutcomeKind.ERROR
        if (out_of_memory or on_the_ladder) and self._rung + 1 < len(self._rescue):
            self._rung += 1
            self._next_profile = smallest
            return
        self._failure = f"the profile trial failed: {outcome.kind.value}: {outcome.message}"

    def _smallest_micro_batch(self) -> int:
        if self.plan.train_batch_size is not None:
            return max(self.plan.divisible_by, self.plan.min_micro_batch)
        return self.plan.allowed_micro_batches[0]

    def _profile_trial(self, micro_batch: int) -> Trial:
        base = self.plan.base_config
        strategy = self._rescue[self._rung] if self._rung >= 0 else of_config(base)
        settings = strategy_settings(strategy, base, self.plan.nvme_path)
        if self._rung >= 0:
            settings["stage"] = strategy.stage
        if strategy.stage > 0:
            # Default buckets take gigabytes whatever the model: small ones let more models fit.
            settings |= smallest_buckets(fixed=self.plan.fixed, stage=strategy.stage)
        batch = BatchTriple(micro_batch * self.plan.slots_per_trial, micro_batch, 1)
        overrides = overrides_for(settings, batch)
        return self._trial(TrialKind.PROFILE, overrides, batch, self.plan.switches)

    def _trial(
        self,
        kind: TrialKind,
        overrides: Mapping[str, Any],
        batch: BatchTriple,
        script_args: Mapping[str, Any],
        proposal: Proposal | None = None,
    ) -> Trial:
        digest = self._fingerprint(overrides, script_args)
        strategy = of_config(self.plan.config(overrides))
        trial_id = len(self.run.trials)
        if kind is not TrialKind.PROFILE:
            self._trial_by_config[digest] = trial_id
        profile = self.run.profile
        return Trial(
            id=trial_id,
            kind=kind,
            name=self._name(kind, strategy, batch, digest),
            stage=strategy.stage,
            strategy=strategy.name,
            batch=batch,
            overrides=overrides,
            script_args=script_args,
            lineage=None if proposal is None else proposal.lineage,
            note={} if proposal is None else proposal.note,
            flops_per_sample=None if profile is None else profile.flops_per_sample,
            predicted_bytes=(
                None
                if self._forecast is None
                else self._forecast.predicted_bytes(overrides, script_args)
            ),
            to_beat={} if kind is TrialKind.PROFILE else self._to_beat(),
        )

    def _to_beat(self) -> dict[str, float]:
        best, metric = self.run.best_value, self.plan.metric
        return {} if best is None or metric not in KNOWN_TO_CI95 else {metric: best}

    def _fingerprint(self, overrides: Mapping[str, Any], script_args: Mapping[str, Any]) -> str:
        base, config = self.plan.base_config, self.plan.config(overrides)
        if "autotuning" in base:  # the names of earlier runs were made with it
            config["autotuning"] = base["autotuning"]
        zero = config["zero_optimization"]
        # As DeepSpeed understands what is absent.
        stage = zero.get("stage", 0)
        config["zero_optimization"] = {"stage": stage, **defaults(stage), **zero}
        return ds_config.fingerprint({"config": config, "script_args": dict(script_args)})

    def _name(self, kind: TrialKind, strategy: Strategy, batch: BatchTriple, digest: str) -> str:
        """`z1_gas1_tmbspg3`, as DeepSpeed's autotuner has it; a digest tells namesakes apart."""
        stem = _stem(strategy, batch)
        if kind is not TrialKind.SEARCH:
            stem = f"{kind.value}_{stem}"
        name, length = stem, 4
        while name in self._names:
            name, length = f"{stem}_{digest[:length]}", length + 1
        self._names.add(name)
        return name

    # -- the journal

    def _append(self, event: dict[str, Any]) -> None:
        if self._replaying:
            return
        now = self._clock()
        event = {**event, "elapsed_s": round(now - self._last_event_s, 3)}
        self._last_event_s = now
        self._journal.append(event)
        self.run.apply(event)

    def _with_skipped(self, event: dict[str, Any]) -> dict[str, Any]:
        """An event with what was passed over on the way to it."""
        skipped, self._skipped = self._skipped, []
        return {**event, "skipped": skipped} if skipped else event

    def _replay(self, event: dict[str, Any]) -> None:
        """Decides again what was decided then, and checks that it is the same."""
        kind = event["event"]
        if kind == EVENT_START:
            difference = self.plan.difference(Plan.from_json(event["plan"]))
            if difference is not None:
                raise JournalMismatch(
                    f"Cannot resume: {difference}. Resume with the options and files that the run "
                    "was started with, or start a new run."
                )
        elif kind == EVENT_PROPOSED:
            # A run may be continued with more trials than it was started with, or with fewer.
            decided = self._decide_ignoring_budget()
            if decided is None or decided.to_json() != event["trial"]:
                said = "nothing" if decided is None else decided.name
                raise JournalMismatch(
                    f"trial {event['trial']['id']} was {event['trial']['name']}, but this dsat "
                    f"decides {said}. The run was made by another version: start a new one."
                )
        elif kind == EVENT_WAITING:
            decided = self._decide_ignoring_budget()
            if decided is not None:
                raise JournalMismatch(
                    f"the run waited before trial {decided.id}, but this dsat decides "
                    f"{decided.name}. The run was made by another version: start a new one."
                )
        self.run.apply(event)
        if kind == EVENT_FORESEEN:
            assert self.run.foreseen is not None
            self._begin_search(self.run.foreseen)
        if kind == EVENT_FINISHED:
            self._hear(event["trial_id"], self.run.outcomes[event["trial_id"]])

    def _decide_ignoring_budget(self) -> Trial | None:
        plan = self.plan
        self.plan = _with_room(plan, len(self.run.trials) + 1)
        try:
            return self._decide()
        finally:
            self.plan = plan
            self._skipped = []  # they are in the event


def _stem(strategy: Strategy, batch: BatchTriple) -> str:
    return f"{strategy.name}_gas{batch.gas}_tmbspg{batch.micro_batch}"


def _with_room(plan: Plan, max_trials: int) -> Plan:
    return replace(plan, max_trials=max(plan.max_trials, max_trials))
