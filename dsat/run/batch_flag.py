"""The script's flags for its batch, such as `--batch-size`, and whether trials use them."""

from __future__ import annotations

from collections.abc import Mapping

from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial


class BatchFlag:
    """The script's flags for its batch sizes, as the trials reveal them.

    A trial that ignores the configured micro batch trains with the value of the script's flag. If
    the trial fails instead, perhaps because the script compares the two, the flag is a guess.

    A flag for the accumulation is used as soon as it is known. No trial can show whether the script
    needs it, for example to schedule the learning rate.

    Args:
        outcomes: outcomes of the run so far, by trial id.

    Attributes:
        name: flag that sets the micro batch in later trials; empty if there is none.
        accumulation: flag that sets the accumulation in later trials; empty if there is none.
        is_guess: whether `name` is a guess, because no trial has shown yet that it helps.
        refused: flags that did not help, each with the message of the trial that showed this. For
            example, the script may ignore its own flag, or have a fixed accumulation.
    """

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        self.name = self.accumulation = ""
        self.is_guess = False
        self.refused: dict[str, str] = {}
        self._outcomes = outcomes
        self._leading: set[str] = set()
        self._is_needless = False  # a trial with another micro batch ran without a flag

    @property
    def names(self) -> dict[str, str]:
        """The flags in use, each with what it sets."""
        uses = {self.name: "micro batch", self.accumulation: "accumulation steps"}
        return {flag: what for flag, what in uses.items() if flag}

    @property
    def leads(self) -> bool:
        """Return whether these flags must precede all other arguments."""
        return not self._leading.isdisjoint((self.name, self.accumulation))

    def update(self, trial: Trial, outcome: Outcome, own_micro_batch: int) -> None:
        """Update the flags by a trial's outcome; `own_micro_batch` is the user's."""
        flag, found, kind = trial.batch_flag, outcome.batch_flag, outcome.kind
        is_other = trial.batch.micro_batch != own_micro_batch
        is_error = kind is OutcomeKind.ERROR and is_other
        lacks_data = outcome.smaller_may_run and outcome.fixed_batch is None
        is_invalid = kind is OutcomeKind.INVALID and not lacks_data
        for each in (trial, outcome):
            if each.flag_leads:
                self._leading |= {each.batch_flag, each.accumulation_flag} - {""}
        self.accumulation = outcome.accumulation_flag or self.accumulation
        if outcome.refuses(trial.accumulation_flag):
            self.accumulation = ""
        if flag and (is_invalid or outcome.refuses(flag) or (is_error and self.is_guess)):
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
        elif outcome.fixed_batch == own_micro_batch:  # also after another flag was refused
            self.name, self.is_guess = found, False
        elif is_error and not (self.name or self._is_needless or outcome.completed_steps):
            self.name, self.is_guess = found, True

    def supersedes(self, trial: Trial) -> bool:
        """Return whether a failed trial should run again with the present flags.

        This is so if it lacked the flag for the micro batch, or had a flag unknown to the script.
        """
        outcome = self._outcomes.get(trial.id)
        if outcome is not None and outcome.refuses(*trial.flags.values()):
            return True
        if outcome is None or outcome.ok or not self.name or trial.batch_flag == self.name:
            return False
        return outcome.fixed_batch is not None or bool(outcome.batch_flag)
