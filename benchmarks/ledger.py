"""What a tuner that is compared spends: every trial it has run, answered from a table."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.made_up_cluster import Cluster
from benchmarks.tables import Table
from dsat.values.objective import Objective
from dsat.values.outcome import Outcome

OBJECTIVE = Objective("throughput")
STAGES = (0, 1, 2, 3)
Workload = Table | Cluster  # what a tuner is tried on


class BudgetSpent(Exception):
    """More trials than a tuner may run."""


class Ledger:
    """Answer trials from a workload and keep account of them.

    Profile trials count like any other, for whoever runs one.

    Args:
        noise: seed of the noise of measurements; None: they are exact.
        sd: standard deviation of a measured time; None: as the workload has it.

    Attributes:
        table: what the answers are from.
        outcomes: of all trials, in their order, without noise; a profile trial has a profile.
        told: the same as they were measured.
        finals: outcomes of runs after the search that decide between what it found.
        recommended: configuration that is recommended in the end; None: what measured best.
    """

    def __init__(
        self,
        table: Workload,
        max_trials: int,
        *,
        noise: int | None = None,
        sd: float | None = None,
    ) -> None:
        self.table = table
        self.outcomes: list[Outcome] = []
        self.told: list[Outcome] = []
        self.finals: list[Outcome] = []
        self.recommended: Mapping[str, Any] | None = None
        self._max_trials = max_trials
        self._sd = sd
        self._rng = None if noise is None else random.Random(noise)

    def profile(self) -> Outcome:
        """Run the model profile."""
        return self._enter(self.table.profile_outcome)

    def run(self, config: Mapping[str, Any]) -> Outcome:
        """Run a trial of a whole DeepSpeed configuration.

        Raises:
            BudgetSpent: it would be one too many.
        """
        return self._enter(self.table.answer(config))

    def run_again(self, config: Mapping[str, Any]) -> Outcome:
        """Run a trial of the finals, which the budget does not count."""
        self.finals.append(self._measured(self.table.answer(config)))
        return self.finals[-1]

    def _enter(self, outcome: Outcome) -> Outcome:
        if len(self.outcomes) == self._max_trials:
            raise BudgetSpent
        self.outcomes.append(outcome)
        self.told.append(self._measured(outcome))
        return self.told[-1]

    def _measured(self, outcome: Outcome) -> Outcome:
        if outcome.metrics is None or self._rng is None:
            return outcome
        sd = self.table.run_sd(outcome) if self._sd is None else self._sd
        factor = math.exp(self._rng.gauss(0, sd))
        m = outcome.metrics
        metrics = replace(
            m,
            throughput=m.throughput / factor,
            latency=factor * m.latency,
            forward=factor * m.forward,
            backward=factor * m.backward,
            step=factor * m.step,
            FLOPS_per_gpu=None if m.FLOPS_per_gpu is None else m.FLOPS_per_gpu / factor,
        )
        return replace(outcome, metrics=metrics)
