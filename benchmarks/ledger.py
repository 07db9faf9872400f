"""The record of all trials that a compared tuner runs; a table answers each trial."""

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
Workload = Table | Cluster  # a source of outcomes for tuners


class BudgetSpent(Exception):
    """The tuner has run all trials of its budget."""


class Ledger:
    """Answers trials from a workload, and records them.

    Profile trials count like all others, if a tuner runs one.

    Args:
        noise: seed of the measurement noise; None: measurements are exact.
        sd: relative standard deviation of a measured time; None: the workload's own.

    Attributes:
        table: the workload that answers.
        outcomes: true outcomes of all trials in order; that of a profile trial has a profile.
        told: the outcomes as measured, with noise.
        finals: outcomes of the trials after the search that decide between its candidates.
        recommended: the final recommendation; None: the configuration that measured best.
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
        """Run the profile trial."""
        return self._enter(self.table.profile_outcome)

    def run(self, config: Mapping[str, Any]) -> Outcome:
        """Run a trial of a complete DeepSpeed configuration.

        Raises:
            BudgetSpent: the budget allows no further trial.
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
