"""Comparison of trials' training with the user's own configuration, over all of their runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsat.run import same_training
from dsat.run.same_training import Agreement, Finding
from dsat.space.plan import Plan
from dsat.values.outcome import Outcome, TrainingCurve
from dsat.values.trial import Trial, TrialKind


class TrainingCheck:
    """Comparison of the losses of trials.

    Args:
        trials, outcomes: of a run, by trial id.
        repeated: the trial that a trial of the finals runs again, by trial id.
    """

    def __init__(
        self,
        trials: Mapping[int, Trial],
        outcomes: Mapping[int, Outcome],
        repeated: Mapping[int, int],
    ) -> None:
        self._trials, self._outcomes, self._repeated = trials, outcomes, repeated

    def compare(self, plan: Plan, own: Trial, trial: Trial) -> Finding:
        """Compare the training of a trial with the user's own configuration."""
        own_curves = self._curves(own)
        precision = same_training.precision_of(plan.config({}))
        same_batch = trial.batch.train_batch_size == own.batch.train_batch_size
        finding = Finding(Agreement.UNKNOWN, "no losses were seen")
        for curve in self._curves(trial):
            finding = same_training.compare(
                own_curves, curve, precision=precision, same_batch=same_batch
            )
            if finding.differs:
                break
        return finding

    def disqualification(
        self, plan: Plan, own: Trial, pick: Trial, changes: Callable[[Trial], Mapping[str, Any]]
    ) -> str | None:
        """Return why a pick that trains differently cannot win; None if it does not.

        Args:
            plan: what is tuned.
            own: the trial of the user's own configuration.
            pick: the other one.
            changes: the settings in which a trial differs from the user's own, with both values.
        """
        finding = self.compare(plan, own, pick)
        if not finding.differs:
            return None
        same = [
            changes(trial)
            for trial in self._trials.values()
            if trial.kind is TrialKind.SEARCH
            and self.compare(plan, own, trial).agreement is Agreement.SAME
        ]
        blamed = same_training.suspects(changes(pick), same)
        said = ", ".join(f"{key}={value[1]}" for key, value in blamed.items()) or "the batch sizes"
        return f"{finding.reason}. What differs: {said}"

    def _curves(self, trial: Trial) -> list[TrainingCurve]:
        """Return the training curves of a trial and of its runs in the finals."""
        ids = [trial.id, *(i for i, again in self._repeated.items() if again == trial.id)]
        curves = [self._outcomes[i].training for i in ids if i in self._outcomes]
        return [curve for curve in curves if curve is not None]
