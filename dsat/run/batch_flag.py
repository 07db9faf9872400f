"""The script's flag for its micro batch: whether trials get it."""

from __future__ import annotations

from collections.abc import Mapping

from dsat.values.outcome import Outcome
from dsat.values.trial import Trial


class BatchFlag:
    """The flag that a script takes its micro batch from, once a trial has shown it.

    Such a trial fed the value of that flag whatever its configuration was.

    Args:
        outcomes: of the run so far, by trial id.

    Attributes:
        name: of the flag, which later trials get; empty if there is none, or if it has no effect.
    """

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        self.name = ""
        self._outcomes = outcomes
        self._has_no_effect = False

    def update(self, trial: Trial, outcome: Outcome, own_micro_batch: int) -> None:
        """Process the outcome of a trial."""
        if trial.batch_flag and outcome.fixed_batch is not None:
            self._has_no_effect = True
        if self._has_no_effect:
            self.name = ""
        elif trial.batch_flag:
            self.name = trial.batch_flag
        elif outcome.fixed_batch == own_micro_batch:
            self.name = outcome.batch_flag

    def supersedes(self, trial: Trial) -> bool:
        """Return whether a trial failed for want of the flag, and may run again with it."""
        outcome = self._outcomes.get(trial.id)
        fed_another = outcome is not None and not outcome.ok and outcome.fixed_batch is not None
        return fed_another and bool(self.name) and not trial.batch_flag
