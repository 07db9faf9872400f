"""The script's command-line flag for its micro batch, and whether trials get it."""

from __future__ import annotations

from collections.abc import Mapping

from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial


class BatchFlag:
    """The script's flag for its micro batch, known from a trial that ignored its configuration.

    Such a trial fed the flag's value, whatever its configuration was. Or it failed, perhaps because
    the script compares the flag with its configuration: then the flag is a guess.

    Args:
        outcomes: outcomes of the run so far, by trial id.

    Attributes:
        name: flag that later trials get; empty if there is none.
        is_guess: whether no trial has shown yet that the flag helps.
        refused: by flag, message of a trial with it that could not be measured; no later trial gets
            it. The script may feed another batch all the same, or have a constant accumulation.
    """

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        self.name = ""
        self.is_guess = False
        self.refused: dict[str, str] = {}
        self._outcomes = outcomes
        self._is_needless = False  # a trial with another micro batch ran without

    def update(self, trial: Trial, outcome: Outcome, own_micro_batch: int) -> None:
        flag, found, kind = trial.batch_flag, outcome.batch_flag, outcome.kind
        is_other = trial.batch.micro_batch != own_micro_batch
        is_error = kind is OutcomeKind.ERROR and is_other
        lacks_data = outcome.smaller_may_run and outcome.fixed_batch is None
        is_invalid = kind is OutcomeKind.INVALID and not lacks_data
        if flag and (is_invalid or (is_error and self.is_guess)):
            self.refused.setdefault(flag, outcome.message)
        if self.name in self.refused:
            self.name, self.is_guess = "", False
        self._is_needless |= outcome.ok and is_other and not flag
        if self.is_guess and self._is_needless:
            self.name, self.is_guess = "", False
        if flag and flag not in self.refused and not self._is_needless:
            self.name, self.is_guess = flag, self.is_guess and not (outcome.ok and is_other)
        elif not found or found in self.refused:
            return
        elif outcome.fixed_batch == own_micro_batch:  # a refused flag may hide another
            self.name, self.is_guess = found, False
        elif is_error and not (self.name or self._is_needless or outcome.completed_steps):
            self.name, self.is_guess = found, True

    def supersedes(self, trial: Trial) -> bool:
        """Return whether a trial failed because it lacked the flag, so it may be run with it."""
        outcome = self._outcomes.get(trial.id)
        if outcome is None or outcome.ok or not self.name or trial.batch_flag == self.name:
            return False
        return outcome.fixed_batch is not None or bool(outcome.batch_flag)
