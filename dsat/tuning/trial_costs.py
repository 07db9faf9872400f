"""Predicted duration of trials, estimated from finished trials."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np

from dsat.search.normal import Array
from dsat.space.plan import Plan
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial

_MOST_KEPT = 64  # of the latest trials, what each took besides its steps


class TrialCosts:
    """Predicts how long trials take, and which would take too long.

    A trial takes the steps before those that are measured, these, and some time besides (the start
    of the script, making the engine).

    Args:
        plan: what is tuned.
        run: the run so far.
    """

    def __init__(self, plan: Plan, run: Run) -> None:
        start, end, _ = plan.measured.get("steps", (3, 7, 0))
        self._warm_up_steps = start - 1
        self._least_steps = end - start + 1
        self._run = run
        self._besides_s: list[float] = []
        self._steps: list[int] = []
        # Seconds of a micro step by samples, the shortest of each, by strategy.
        self._micro_steps: dict[str, dict[int, float]] = {}

    def update(self, trial: Trial, outcome: Outcome) -> None:
        """Update with the duration of a trial."""
        if outcome.metrics is None:
            return
        step_s = outcome.metrics.latency / 1000
        steps = self._warm_up_steps + outcome.metrics.num_steps
        self._besides_s = [*self._besides_s, max(0.0, outcome.duration_s - steps * step_s)]
        self._besides_s = self._besides_s[-_MOST_KEPT:]
        self._steps = [*self._steps, steps][-_MOST_KEPT:]
        known = self._micro_steps.setdefault(trial.strategy, {})
        size, micro_s = trial.batch.micro_batch, step_s / trial.batch.gas
        known[size] = min(micro_s, known.get(size, micro_s))

    def trial_s(self, step_s: Any) -> Any:
        """Seconds of whole trials, by the seconds of their optimizer steps (also an array)."""
        if not self._steps:
            return (self._warm_up_steps + self._least_steps) * step_s
        return statistics.median(self._besides_s) + statistics.median(self._steps) * step_s

    def are_too_long(self, step_s: Any) -> Any:
        """Return which trials would exceed the time limit, by the seconds of their steps."""
        longest_s = self._run.longest_s
        return self._least_steps * step_s > (math.inf if longest_s is None else longest_s)

    def micro_step_s(self, strategy: str, sizes: Array) -> Array:
        """At least about so many seconds micro steps take, by their samples; 0 if nothing is known.

        By the same strategy, else by the fastest: between two micro batches that ran linear, above
        them by what the last samples cost, below them in proportion. Of a strategy with one micro
        batch only, others tell how its steps grow.

        Args:
            strategy: its name.
            sizes: micro batches, (n,).

        Returns:
            (n,)
        """
        own, others = self._micro_steps.get(strategy), list(self._micro_steps.values())
        if own and len(own) == 1:
            [(size, micro_s)] = own.items()
            curves = [each for each in others if len(each) > 1]
            here = np.array([size])
            found = [micro_s * _at(each, sizes) / _at(each, here) for each in curves]
            found = found or [_at(own, sizes)]
        else:
            found = [_at(each, sizes) for each in ([own] if own else others)]
        least: Array = np.min([*found, np.full(len(sizes), np.inf)], axis=0)
        return np.where(np.isfinite(least), least, 0.0)


def _at(known: dict[int, float], sizes: Array) -> Array:
    """Seconds of micro steps of so many samples, from those that are known."""
    at = np.array(sorted(known), float)
    micro_s = np.array([known[int(size)] for size in at])
    found: Array = np.where(
        sizes < at[0], micro_s[0] * sizes / at[0], np.interp(sizes, at, micro_s)
    )
    if len(at) == 1:
        return found
    slope = max(0.0, (micro_s[-1] - micro_s[-2]) / (at[-1] - at[-2]))
    found += slope * np.maximum(0.0, sizes - at[-1])
    return found
