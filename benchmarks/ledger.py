"""What a tuner that is compared spends: every trial it has run, answered from a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import Table
from dsat.values.objective import Objective
from dsat.values.outcome import Outcome

OBJECTIVE = Objective("throughput")
STAGES = (0, 1, 2, 3)


class BudgetSpent(Exception):
    """More trials than a tuner may run."""


class Ledger:
    """Answers trials from a table and keeps account of them.

    Profile trials count like any other, for whoever runs one.

    Attributes:
        table: what the answers are from.
        outcomes: of all trials, in their order; a profile trial has a profile.
    """

    def __init__(self, table: Table, max_trials: int) -> None:
        self.table = table
        self.outcomes: list[Outcome] = []
        self._max_trials = max_trials

    def profile(self) -> Outcome:
        """Runs the model profile."""
        return self._enter(self.table.profile_outcome)

    def run(self, config: Mapping[str, Any]) -> Outcome:
        """Runs a trial of a whole DeepSpeed configuration.

        Raises:
            BudgetSpent: it would be one too many.
        """
        return self._enter(self.table.answer(config))

    def _enter(self, outcome: Outcome) -> Outcome:
        if len(self.outcomes) == self._max_trials:
            raise BudgetSpent
        self.outcomes.append(outcome)
        return outcome
