"""Check that trials train like the user's own configuration, over all runs of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsat.command import ds_config
from dsat.in_trial.batches import UNCOUNTED
from dsat.run import same_training
from dsat.run.same_training import Agreement, Finding
from dsat.space.plan import Plan
from dsat.values import hazards
from dsat.values.outcome import Outcome, TrainingCurve
from dsat.values.trial import Trial, TrialKind
from dsat.values.zero_strategy import read_strategy

_MOST_APART = 1.5  # ratio of tokens per sample above which throughputs are not compared
_OWN = "your own configuration"
OWN_IS_WRONG = f"Likely wrong: {_OWN}"


def training_of(plan: Plan, trial: Trial) -> hazards.Training:
    """Return the facts that decide whether known faults of DeepSpeed affect a trial."""
    return training_with(plan.config(trial.overrides), trial.batch.gas, plan)


def _tokens_per_sample(outcome: Outcome) -> float:
    """Return tokens per (counted or assumed) sample; 0 if tokens were not counted."""
    metrics = outcome.metrics
    if metrics is None or metrics.throughput <= 0:
        return 0.0
    return (metrics.tokens_per_second or 0.0) / metrics.throughput


def training_with(config: Mapping[str, Any], gas: int, plan: Plan) -> hazards.Training:
    """Return the facts that decide which known faults affect a configuration."""
    is_open = ds_config.data_types(config)[0] is None  # the script decides, and may choose bf16
    return hazards.Training(
        config,
        read_strategy(config).stage,
        "bf16" if is_open else same_training.precision_of(config),
        gas,
        plan.slots_per_trial,
        on_cpu=not plan.offload_helps,
    )


@dataclass(frozen=True)
class TrainingCheck:
    """Comparison of the losses and gradients of trials with the user's own configuration.

    Attributes:
        own: first trial of the user's own configuration.
        trials, outcomes, repeated: as in `Run`.
        changes: returns a trial's settings that differ from the user's own, with both values.
        version: DeepSpeed's version; None if unknown.
    """

    plan: Plan
    own: Trial
    trials: Mapping[int, Trial]
    outcomes: Mapping[int, Outcome]
    repeated: Mapping[int, int]
    changes: Callable[[Trial], Mapping[str, Any]]
    version: str | None = None

    def compare(self, trial: Trial) -> Finding:
        own_curves, precision = self._curves(self.own), self._precision
        same_batch = trial.batch.train_batch_size == self.own.batch.train_batch_size
        finding = Finding(Agreement.UNKNOWN, "no losses were recorded")
        for curve in self._curves(trial):
            finding = same_training.compare(
                own_curves, curve, precision=precision, same_batch=same_batch
            )
            if finding.differs:
                break
        return finding

    def find_excluded(self, pick: Trial, same_batch: Trial | None) -> dict[int, str]:
        """Return which trials the finals exclude, as reasons by trial id.

        Losses at different global batches cannot be compared. So a pick is also excluded if its
        strategy trains differently at the user's global batch.

        Args:
            same_batch: the final at the user's global batch; None if it has not run.
        """
        reason = self.disqualification(pick)
        if reason is not None:
            return {pick.id: reason}
        reason = None if same_batch is None else self.disqualification(same_batch)
        if reason is None or same_batch is None:
            return {}
        if same_batch.strategy != pick.strategy:
            return {same_batch.id: reason}
        return {pick.id: f"at your global batch, {reason}"}

    def disqualification(self, pick: Trial) -> str | None:
        """Return why a pick that trains differently cannot win; None if it may."""
        finding = self.compare(pick)
        if not finding.differs:
            return self._compare_uncounted(pick)
        reason = f"on the same data it trains differently from yours. {finding.reason}"
        if finding.of_gradients:
            return f"{reason}. {self._likely_wrong(pick)}"
        harmless = [
            self.changes(trial)
            for trial in self.trials.values()
            if trial.kind is TrialKind.SEARCH and self.compare(trial).agreement is Agreement.SAME
        ]
        blamed = same_training.suspects(self.changes(pick), harmless)
        cause = ", ".join(f"{key}={value[1]}" for key, value in blamed.items()) or "the batch sizes"
        return f"{reason}. Possible cause: {cause}"

    def _compare_uncounted(self, pick: Trial) -> str | None:
        """Return why a pick's throughput cannot be compared with the baseline's; None if it can.

        If samples were not counted, throughput assumes micro batches of the configured size. If the
        data loader forms batches of another size (by tokens, say), a larger configured micro batch
        only seems faster.
        """
        outcome = self.outcomes[pick.id]
        if UNCOUNTED not in outcome.warnings:
            return None
        ours, yours = map(_tokens_per_sample, (outcome, self.outcomes[self.own.id]))
        if not ours or not yours or max(ours, yours) <= _MOST_APART * min(ours, yours):
            return None
        return (
            f"its samples had {ours:,.0f} tokens on average, and yours {yours:,.0f}, so the data "
            "loader does not follow the micro batch of the configuration"
        )

    def _likely_wrong(self, pick: Trial) -> str:
        """Say which is likely wrong, pick or baseline, by known faults or by other trials."""
        version, pair = self.version, {_OWN: self.own, "this configuration": pick}
        faults = {
            name: hazard[0].describe(version or "")
            for name, trial in pair.items()
            if (hazard := hazards.find(version, training_of(self.plan, trial), hazards.GRADIENTS))
        }
        if len(faults) == 1:
            [(name, fault)] = faults.items()
            return f"Likely wrong: {name}. {fault}"
        votes = dict.fromkeys(pair, 0)
        for trial in self.trials.values():
            if trial.strategy in (self.own.strategy, pick.strategy):
                continue
            for name, candidate in pair.items():
                agree = [
                    same_training.norms_agree(curve, other, self._precision)
                    for curve in self._curves(candidate)[:1]
                    for other in self._curves(trial)[:1]
                    if trial.batch.train_batch_size == candidate.batch.train_batch_size
                ]
                votes[name] += agree == [True]
        if len({*votes.values()}) == 1:
            return "Either may be wrong: compare both with training without DeepSpeed"
        wrong, right = sorted(votes, key=votes.__getitem__)
        return f"Likely wrong: {wrong}, because trials of other strategies agree with {right}"

    @property
    def _precision(self) -> str:
        return same_training.precision_of(self.plan.config({}))

    def _curves(self, trial: Trial) -> list[TrainingCurve]:
        ids = [trial.id, *(i for i, repeated in self.repeated.items() if repeated == trial.id)]
        curves = [self.outcomes[i].training for i in ids if i in self.outcomes]
        return [curve for curve in curves if curve is not None]
