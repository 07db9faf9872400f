"""State of a run, computed from its journal: trials, outcomes, the best one, why it stopped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from dsat.command import ds_config
from dsat.memory.predictor import Basis
from dsat.run import events
from dsat.run.batch_flag import BatchFlag
from dsat.run.comparison import Gain, Variation, margin_of_single_runs
from dsat.run.finals import Contestant, Finals, Rules, reserved
from dsat.run.training_check import TrainingCheck
from dsat.space.plan import Plan
from dsat.values import hazards
from dsat.values.outcome import ModelProfile, Outcome
from dsat.values.trial import Trial, TrialKind

TIMES_THE_OWN = 20.0  # a trial may always measure for the time of this many steps of the baseline


class Run:
    """State of a run, computed by applying the events of its journal in order.

    Attributes:
        has_begun: whether a first event was applied; `plan` does not exist before.
        info: name, versions and machine, from the journal's first line.
        earlier: ids of trials that are reused from earlier runs in the folder.
        repeat: second trial of the user's own configuration, in a run without finals.
        leader: best trial before the finals whose batch sizes the plan admits; maybe the baseline.
        finals: finals after the search; None before, without finals, or once the search resumed.
        batch_flag: the script's flags for its micro batch and its accumulation.
        repeated: by id of a final or repeat, the id of the trial that it runs again.
        profiled: outcome of the latest trial that tried to profile the model.
        disqualified: by trial id, why a configuration of the finals is excluded although it ran.
        same_batch_final: final at the user's global batch; None without one.
        search_ended: why the search ended; None before the finals began.
        converged: whether the search would have ended even with a larger budget.
        is_reopened: whether a larger budget lets the search resume after its finals. The finals
            stay valid until it begins a trial.
        stop_reason: why the run ended; None while it runs or if it was interrupted.
        paused: whether it was interrupted and did not continue.
        neighbours: by trial id, the largest number of other trials that ran at the same time.
        running_s: wall time without pauses, from the command's start to the last event.
        ended_s, ended_at_s: by trial id, its end as `running_s`, and as a date in seconds since the
            epoch; the date is None if the journal has no dates.
    """

    def __init__(
        self, lines: Iterable[Mapping[str, Any]] = (), *, name: str = "the journal"
    ) -> None:
        self.has_begun = False
        self.plan: Plan
        self.info: Mapping[str, Any] = {}
        self.trials: dict[int, Trial] = {}
        self.outcomes: dict[int, Outcome] = {}
        self._ran = 0  # trials that ran
        self.earlier: set[int] = set()
        self.baseline: Trial | None = None
        self.repeat: Trial | None = None
        self.profiled: Outcome | None = None
        self.leader: Trial | None = None
        self.finals: Finals | None = None
        self.search_ended: str | None = None
        self.converged = False
        self.is_reopened = False
        self._earlier_variation: Variation | None = None
        self.disqualified: dict[int, str] = {}
        self.same_batch_final: Trial | None = None
        self.batch_flag = BatchFlag(self.outcomes)
        self.repeated: dict[int, int] = {}
        self._changes: dict[tuple[int, bool], dict[str, tuple[Any, Any]]] = {}
        self.memory_basis: Basis | None = None
        self.stop_reason: str | None = None
        self.paused = False
        self.neighbours: dict[int, int] = {}
        self.running_s = 0.0
        self.ended_s: dict[int, float] = {}
        self.ended_at_s: dict[int, float | None] = {}

        def apply(event: Mapping[str, Any]) -> None:
            self.apply(event)
            if event["event"] == events.EVENT_PROPOSED:
                config = self.plan.config(event["trial"].overrides)
                ds_config.check_sections(config, where=event["trial"].name)

        events.replay(lines, apply, name)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Apply one event; if its kind is unknown, only its duration counts."""
        kind = event["event"]
        self.paused = kind == events.EVENT_PAUSED
        self.running_s += event.get("elapsed_s", 0.0)
        if kind in (events.EVENT_EARLIER, events.EVENT_PROPOSED):
            trial = event["trial"]
            self.trials[trial.id] = trial
            if trial.kind is TrialKind.BASELINE:
                self.baseline = trial
        if kind == events.EVENT_START:
            self.has_begun = True
            self.plan = event["plan"]
            self.info = event["info"]
        elif kind == events.EVENT_EARLIER:
            self.earlier.add(trial.id)
            self.neighbours[trial.id] = event["neighbours"]
            self._finish(trial.id, event["outcome"])
        elif kind == events.EVENT_PROPOSED:
            if self.is_reopened and trial.kind is not TrialKind.FINAL:
                self._earlier_variation = self.variation
                self.finals, self.is_reopened = None, False  # new ones follow
            running = self.running
            for other in running:
                self.neighbours[other.id] = max(len(running) - 1, self.neighbours.get(other.id, 0))
            if trial.kind is TrialKind.REPEAT and self.baseline is not None:
                self.repeat = trial
                self.repeated[trial.id] = self.baseline.id
            elif trial.kind is TrialKind.FINAL and self.finals and not self.finals.over:
                if self.finals.repeated_id is None:
                    self.same_batch_final = trial
                else:
                    self.repeated[trial.id] = self.finals.repeated_id
            self.stop_reason = None
        elif kind == events.EVENT_FINISHED and event["trial_id"] not in self.outcomes:
            self._finish(event["trial_id"], event["outcome"], event.get("time_s"))
        elif kind == events.EVENT_MEMORY_BASIS:
            self.memory_basis = event["basis"]
        elif kind == events.EVENT_FINALS:
            self._begin_finals(event)
        elif kind == events.EVENT_BUDGET:
            converged = event.get("converged", self.converged)
            self.is_reopened |= event["max_trials"] > self.plan.max_trials and not converged
            budget = {name: event[name] for name in events.OF_A_BUDGET if name in event}
            self.plan = replace(self.plan, **budget)
            self.stop_reason = None
        elif kind == events.EVENT_STOPPED:
            self.stop_reason = event["reason"]
        self.__dict__.pop("best", None)  # cached, as a view reads it fifty times

    def _finish(self, trial_id: int, outcome: Outcome, at_s: float | None = None) -> None:
        self.outcomes[trial_id] = outcome
        self._ran += outcome.ok
        self.ended_at_s[trial_id] = at_s
        self.ended_s[trial_id] = self.running_s
        trial = self.trials[trial_id]
        self.batch_flag.update(trial, outcome, self.plan.own_batch.micro_batch)
        if trial.profiles:
            self.profiled = outcome
        value = outcome.value(self.plan.objective)
        if trial.kind in (TrialKind.PROFILE, TrialKind.REPEAT):
            return
        if trial.kind is TrialKind.FINAL:
            # Another version of dsat may have run more pairs than this version requires.
            if self.finals is not None and not self.finals.over:
                log_value = None if value is None else self.plan.objective.log_value(value)
                self.finals.record(log_value, may_repeat=not outcome.kind.is_unsafe)
                self._check_training(self.finals)
            return
        if (
            value is not None
            and self.plan.objective.is_better(value, self.value(self.leader))
            and self.plan.admits(trial.batch)
        ):
            self.leader = trial

    def _begin_finals(self, event: Mapping[str, Any]) -> None:
        if self.baseline is None:
            raise ValueError("finals without the user's own configuration")
        self.search_ended = event["reason"]
        self.converged = event.get("converged", not events.is_of_budget(event["reason"]))
        for trial_id in [i for i in self.repeated if self.trials[i].kind is TrialKind.FINAL]:
            del self.repeated[trial_id]
        self.disqualified, self.is_reopened = {}, False
        ids = (*event["leaders"], *event.get("reserves", ()))
        candidates = [self.contestant(self.trials[trial_id]) for trial_id in ids]
        baseline, rules = self.contestant(self.baseline), Rules.of_event(event)
        self.finals = Finals(baseline, candidates, rules, same_batch=event["same_batch"])

    def _check_training(self, finals: Finals) -> None:
        if finals.pick is None:
            return
        pick = self.trials[finals.pick.trial_id]
        same_batch = None if finals.same_batch_gain is None else self.same_batch_final
        excluded = check_of(self).find_excluded(pick, same_batch)
        self.disqualified |= excluded
        if pick.id in excluded:
            finals.disqualify()
        elif excluded:
            finals.forget_same_batch()

    def contestant(self, trial: Trial, predicted: float | None = None) -> Contestant:
        """Return the `Contestant` of a measured trial; `predicted` is its predicted log value."""
        outcome, value, variation = self.outcomes[trial.id], self.value(trial), self.variation
        if value is None or outcome.metrics is None:
            raise ValueError(f"trial {trial.id} was not measured")
        memory, error = outcome.memory, outcome.metrics.standard_error
        log_value = self.plan.objective.log_value(value)
        return Contestant(
            trial_id=trial.id,
            log_value=log_value,
            predicted=log_value if predicted is None else predicted,
            standard_error=max(error, variation.sd if variation else 0.0),
            train_batch_size=trial.batch.train_batch_size,
            memory_bytes=memory.peak if memory is not None and memory.is_exact else None,
            changes=len(self.changes(trial)),
            ran_alone=not self.neighbours.get(trial.id),
        )

    def changes(self, trial: Trial) -> dict[str, tuple[Any, Any]]:
        """Return settings and switches that differ from the user's own, except batch sizes.

        Each dotted path maps to the user's value and the trial's value; None if it is not set.
        """
        key = trial.id, self.profiled is not None  # the profile lists the script's switches
        if key not in self._changes:
            switches, plan = own_switches(self), self.plan
            user = ds_config.flat({**plan.config({}), **switches})
            new = ds_config.flat({**plan.config(trial.overrides), **switches, **trial.script_args})
            self._changes[key] = {
                path: (user.get(path), new.get(path))
                for path in dict.fromkeys([*user, *new])
                if user.get(path) != new.get(path) and path not in trial.batch.config()
            }
        return self._changes[key]

    @cached_property
    def best(self) -> Trial | None:
        """Trial of the recommended configuration; None if no admitted trial ran.

        After the finals, it is their winner. Before, it is the best trial that surely beats the
        baseline. Without such a trial, or if the pairs so far show no gain, it is the baseline.
        """
        finals, own = self.finals, self.baseline
        if finals is None or not finals.over:
            pairs = None if finals is None else finals.comparison
            if self.leader is None:
                return None
            return own if pairs is not None and pairs.mean <= 0 else self._surely_best or own
        assert own is not None
        pick = None if finals.pick is None else self.trials[finals.pick.trial_id]
        if pick is None:
            return own if self.plan.admits(own.batch) else self.leader
        # Without a pair, single runs decide.
        is_better = _surely_beats(self, pick) if finals.comparison is None else finals.is_worth_it
        return pick if is_better or not self.plan.admits(own.batch) else own

    @property
    def _surely_best(self) -> Trial | None:
        """Best trial that surely beats the baseline by enough, or cannot be compared; else None."""
        admitted = [trial for trial in searched(self) if self.plan.admits(trial.batch)]
        eligible = [trial for trial in admitted if trial.id not in self.disqualified]
        ranked = sorted(eligible, key=lambda t: self.plan.objective.loss(self.value(t) or 0.0))
        return next((trial for trial in ranked if _surely_beats(self, trial)), None)

    def gain_of(self, trial: Trial | None) -> Gain | None:
        """Return the gain of a measured trial over the baseline, from single runs of both.

        Returns:
            None if either was not measured, if they are the same trial, or if the plan does not
            admit the baseline's batch sizes.
        """
        baseline = self.baseline
        if baseline is None or trial is None or trial is baseline or self.value(baseline) is None:
            return None
        if not self.plan.admits(baseline.batch):
            return None
        first, second = self.contestant(baseline), self.contestant(trial)
        errors = first.standard_error, second.standard_error
        variation = self.variation or _variation_of_repeat(self)
        margin = margin_of_single_runs(errors, self._ran, variation)
        return Gain.of_log(second.log_value - first.log_value, margin)

    @property
    def best_outcome(self) -> Outcome | None:
        """Outcome of the best configuration (see `typical_outcome`); None without one."""
        return None if self.best is None else typical_outcome(self, self.best)

    @property
    def variation(self) -> Variation | None:
        """Run-to-run variation, measured in these or earlier finals; None before."""
        comparison = None if self.finals is None else self.finals.comparison
        return self._earlier_variation if comparison is None else comparison.variation

    @property
    def best_value(self) -> float | None:
        """The objective's value of the best configuration (see `final_value`); None without one."""
        return None if self.best is None else final_value(self, self.best)

    @property
    def deepspeed_version(self) -> str | None:
        """DeepSpeed's version where trials run; None if the journal does not say."""
        curves = [o.training for o in self.outcomes.values() if o.training]
        reported = next((c.deepspeed_version for c in curves if c.deepspeed_version), None)
        return hazards.version_in(str(self.info.get("software", ""))) or reported

    def longest_s(self, kind: TrialKind) -> float | None:
        """Return the time limit of a trial's measurement in seconds; None for no limit.

        It is `Plan.longest_s`, or the time of 20 steps of the baseline if that is longer. If the
        baseline did not run, the fastest trial's steps count. If finals follow, trials of the
        search get half, which saves a third if steps are long and noisy (`benchmarks/native.py`).
        """
        longest_s, own = self.plan.longest_s, self.baseline and self.outcomes.get(self.baseline.id)
        if longest_s is None:
            return None
        outcomes = [own] if own and own.metrics else self.outcomes.values()
        usual_ms = min((o.metrics.latency for o in outcomes if o.metrics), default=0.0)
        limit_s = max(longest_s, TIMES_THE_OWN * usual_ms / 1000)
        has_finals = own and own.ok and reserved(self.plan.max_trials, self.plan.finals)
        return limit_s / 2 if has_finals and kind is TrialKind.SEARCH else limit_s

    @property
    def profile(self) -> ModelProfile | None:
        return None if self.profiled is None else self.profiled.profile

    @property
    def running(self) -> list[Trial]:
        return [trial for trial in self.trials.values() if trial.id not in self.outcomes]

    def value(self, trial: Trial | None) -> float | None:
        """Return the objective's value of a trial; None if it was not measured."""
        outcome = None if trial is None else self.outcomes.get(trial.id)
        return None if outcome is None else outcome.value(self.plan.objective)


def _surely_beats(run: Run, trial: Trial) -> bool:
    """Return whether single runs show a sure and sufficient gain, or no gain can be computed."""
    gain, user_batch = run.gain_of(trial), run.plan.own_batch
    is_larger = trial.batch.train_batch_size > user_batch.train_batch_size
    least = 1 + run.plan.indifference if is_larger else 1.0
    return gain is None or (gain.low > 1 and gain.ratio > least)


def _variation_of_repeat(run: Run) -> Variation | None:
    """Return the variation between the baseline and its repeat; None if not comparable."""
    own, repeat = run.baseline, run.repeat
    if own is None or repeat is None or run.neighbours[own.id] != run.neighbours[repeat.id]:
        return None
    first, second = run.value(own), run.value(repeat)
    if first is None or second is None:
        return None
    log_value = run.plan.objective.log_value
    return Variation(abs(log_value(second) - log_value(first)) / math.sqrt(2), 1)


def check_of(run: Run) -> TrainingCheck:
    """Return the check that trials train like the baseline, which must have ended."""
    assert run.baseline is not None
    trials, outcomes, version = run.trials, run.outcomes, run.deepspeed_version
    return TrainingCheck(
        run.plan, run.baseline, trials, outcomes, run.repeated, run.changes, version
    )


def searched(run: Run) -> list[Trial]:
    """Return the trials of the search that were measured."""
    trials = [trial for trial in run.trials.values() if trial.kind is TrialKind.SEARCH]
    return [trial for trial in trials if run.value(trial) is not None]


def final_value(run: Run, trial: Trial) -> float | None:
    """Return a trial's mean value in the finals' pairs, or else its first run's value, or None.

    The mean is used only if the best configuration is in the pairs, so that the values of the best
    and of the user's own configuration can be compared.
    """
    finals, best = run.finals, run.best
    if finals is None or best is None or finals.mean_log_value(best.id) is None:
        return run.value(trial)
    mean = finals.mean_log_value(trial.id)
    return run.value(trial) if mean is None else run.plan.objective.value_of(mean)


def typical_outcome(run: Run, trial: Trial) -> Outcome | None:
    """Return the outcome of a trial's median re-run in the finals; without a pair, its own, if any.

    Once the search resumes after finals, their re-runs are ignored.
    """
    has_pairs = run.finals is not None and run.finals.pairs
    reruns = [run.trials[i] for i, repeated in run.repeated.items() if repeated == trial.id]
    finals = [trial for trial in reruns if trial.kind is TrialKind.FINAL and has_pairs]
    ran = sorted((value, t.id) for t in finals if (value := run.value(t)) is not None)
    return run.outcomes[ran[(len(ran) - 1) // 2][1]] if ran else run.outcomes.get(trial.id)


def own_switches(run: Run) -> dict[str, Any]:
    """Return the values of the script's switches that the user's own command trains with."""
    switches = {} if run.profile is None else run.profile.switches
    return {
        **{name: switch.values[0] for name, switch in switches.items()},
        **{n: values[0] for n, values in run.plan.listed_switches.items() if n not in switches},
        **run.plan.switches,
    }
