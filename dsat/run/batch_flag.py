"""The script's flag for its micro batch: whether trials get it."""

from __future__ import annotations

from collections.abc import Mapping

from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial


class BatchFlag:
    """The flag that a script takes its micro batch from, once a trial has shown it.

    Such a trial fed the value of that flag whatever its configuration was.

    Args:
        outcomes: of the run so far, by trial id.

    Attributes:
        name: of the flag, which later trials get; empty if there is none.
        refusal: message of a trial with the flag that could not be measured, after which none gets
            it (the script may feed another batch nevertheless, or have a constant accumulation).
    """

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        self.name = self.refusal = ""
        self._outcomes = outcomes

    def update(self, trial: Trial, outcome: Outcome, own_micro_batch: int) -> None:
        """Process the outcome of a trial."""
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
        """Return whether a trial failed for want of the flag, and may run again with it."""
        outcome = self._outcomes.get(trial.id)
        fed_another = outcome is not None and not outcome.ok and outcome.fixed_batch is not None
        return fed_another and bool(self.name) and not trial.batch_flag
