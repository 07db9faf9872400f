"""Factory of trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsat.run.run import Run
from dsat.search.base import Proposal
from dsat.space.locate import fingerprint
from dsat.space.plan import Plan
from dsat.values.objective import METRICS
from dsat.values.outcome import StepFacts
from dsat.values.trial import BatchTriple, Trial, TrialKind
from dsat.values.zero_strategy import Strategy, of_config

SEARCHED = (TrialKind.BASELINE, TrialKind.SEARCH)
_LIMITED = (TrialKind.SEARCH, TrialKind.FINAL, TrialKind.REPEAT)


class TrialFactory:
    """Factory of a run's trials, which have numbers in order and unique names.

    The run must record each trial before the next one is made.
    """

    def __init__(self, plan: Plan, run: Run) -> None:
        self._plan = plan
        self._run = run

    def make(
        self,
        kind: TrialKind,
        overrides: Mapping[str, Any],
        batch: BatchTriple,
        script_args: Mapping[str, Any],
        *,
        proposal: Proposal | None = None,
        predicted_bytes: int | None = None,
    ) -> Trial:
        """Return the run's next trial.

        `overrides` include the batch sizes; `proposal` is None unless a search proposed the trial.
        """
        strategy = self.strategy(overrides)
        profile = self._run.profile
        return Trial(
            id=len(self._run.trials),
            kind=kind,
            name=self._name(kind, strategy, batch, self.fingerprint(overrides, script_args)),
            stage=strategy.stage,
            strategy=strategy.name,
            batch=batch,
            overrides=overrides,
            script_args=script_args,
            lineage=None if proposal is None else proposal.arm,
            note={} if proposal is None else proposal.note,
            flops_per_sample=None if profile is None else profile.flops_per_sample,
            batch_dimensions={} if profile is None else profile.batch_dimensions,
            fed_instead={} if profile is None else profile.fed_instead,
            predicted_bytes=predicted_bytes,
            to_beat=self._to_beat() if kind in SEARCHED else {},
            longest_s=self._run.longest_s(kind) if kind in _LIMITED else None,
            own_steps=self._own_steps(),
            batch_flag=self._run.batch_flag.name,
            flag_leads=self._run.batch_flag.leads,
        )

    def _own_steps(self) -> StepFacts | None:
        """Return configured and actual accumulation of the user's own trial; None if unknown."""
        own = self._run.baseline
        outcome = None if own is None else self._run.outcomes.get(own.id)
        curve = None if outcome is None else outcome.training
        facts = None if curve is None else curve.facts
        return None if facts is None else StepFacts(facts.gas, facts.micro_steps)

    def strategy(self, overrides: Mapping[str, Any]) -> Strategy:
        return of_config(self._plan.config(overrides))

    def fingerprint(self, overrides: Mapping[str, Any], script_args: Mapping[str, Any]) -> str:
        """Return a digest that is the same for all configurations that DeepSpeed treats alike."""
        return fingerprint(self._plan.config(overrides), script_args)

    def is_like(
        self, trial: Trial, overrides: Mapping[str, Any], script_args: Mapping[str, Any]
    ) -> bool:
        """Return whether DeepSpeed treats a trial's configuration like the given one."""
        its = self.fingerprint(trial.overrides, trial.script_args)
        return its == self.fingerprint(overrides, script_args)

    def _to_beat(self) -> dict[str, float]:
        run, metric = self._run, self._plan.metric
        value = run.value(run.leader or run.baseline)
        return {} if value is None or not METRICS[metric].has_interval else {metric: value}

    def _name(self, kind: TrialKind, strategy: Strategy, batch: BatchTriple, digest: str) -> str:
        """Return a unique name, `profile_z1_gas1_tmbspg3`; a search trial's kind is omitted."""
        stem = f"{strategy.name}_gas{batch.gas}_tmbspg{batch.micro_batch}"
        if kind is TrialKind.FINAL:
            stem = f"{kind.value}{count_finals(self._run) + 1}_{stem}"
        elif kind is not TrialKind.SEARCH:
            stem = f"{kind.value}_{stem}"
        names = {trial.name for trial in self._run.trials.values()}
        name, length = stem, 4
        while name in names:
            name, length = f"{stem}_{digest[:length]}", length + 1
        return name


def count_finals(run: Run) -> int:
    """Return the number of trials in all finals of a run so far."""
    return sum(trial.kind is TrialKind.FINAL for trial in run.trials.values())
