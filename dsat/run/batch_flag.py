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
        refused: by flag, message of a trial with it that could not be measured; no later trial gets
            it. The script may feed another batch all the same, or have a constant accumulation.
    """

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        self.name = ""
        self.refused: dict[str, str] = {}
        self._outcomes = outcomes

    def update(self, trial: Trial, outcome: Outcome, own_micro_batch: int) -> None:
        flag, is_invalid = trial.batch_flag, outcome.kind is OutcomeKind.INVALID
        if flag and is_invalid and not outcome.smaller_may_run:
            self.refused.setdefault(flag, outcome.message)
        if (not flag or flag in self.refused) and outcome.fixed_batch == own_micro_batch:
            flag = outcome.batch_flag  # with a refused flag changed, it may be another
        if flag and flag not in self.refused:
            self.name = flag
        elif self.name in self.refused:
            self.name = ""

    def supersedes(self, trial: Trial) -> bool:
        """Return whether a trial failed because it lacked the flag, so it may be run with it."""
        outcome = self._outcomes.get(trial.id)
        fed_another = outcome is not None and not outcome.ok and outcome.fixed_batch is not None
        return fed_another and bool(self.name) and trial.batch_flag != self.name
