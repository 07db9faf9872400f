"""The script's command-line flag for its micro batch, and whether trials get it."""

from __future__ import annotations

from collections.abc import Mapping

from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial


class BatchFlag:
    """The script's flag for its micro batch, known from a trial that ignored its configuration.

    Such a trial fed micro batches of the flag's value.

    Args:
        outcomes: outcomes of the run so far, by trial id.

    Attributes:
        name: flag that later trials get; empty if there is none.
        refusal: message of the trial with the flag that could not be measured, because the script
            feeds another batch or accumulation anyway; no later trial gets the flag. Empty if none.
    """

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        self.name = self.refusal = ""
        self._outcomes = outcomes

    def update(self, trial: Trial, outcome: Outcome, own_micro_batch: int) -> None:
        is_refused = outcome.kind is OutcomeKind.INVALID and not outcome.smaller_may_run
        if trial.batch_flag and is_refused and not self.refusal:
            self.refusal = outcome.message
        if self.refusal:
            self.name = ""
        elif trial.batch_flag:
            self.name = trial.batch_flag
        elif outcome.fixed_batch == own_micro_batch:
            self.name = outcome.batch_flag

    def supersedes(self, trial: Trial) -> bool:
        """Return whether a trial failed because it lacked the flag, so it may be run with it."""
        outcome = self._outcomes.get(trial.id)
        fed_another = outcome is not None and not outcome.ok and outcome.fixed_batch is not None
        return fed_another and bool(self.name) and not trial.batch_flag
