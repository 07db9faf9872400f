"""Predicted duration of trials, from finished trials."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from typing import Any

import numpy as np

from dsat.run.run import Run
from dsat.space.plan import Plan
from dsat.values.outcome import Outcome
from dsat.values.trial import FEWEST_MAY_TAKE, BatchTriple, Trial, TrialKind
from dsat.values.zero_strategy import Strategy, read_strategy

_MOST_KEPT = 64  # latest trials whose durations the predictions use
# Time limits of one trial (`_LONGEST`), which the finals may repeat a few times, and of the whole
# search (`_SEARCH`). They are multiples of the baseline's duration, but at least these seconds.
_LONGEST, _LONGEST_S = 5.0, 20.0
TOO_LONG_S = 60.0  # no trial starts if its fewest steps exceed both this and `Run.longest_s`
_SEARCH, _SEARCH_S = 15.0, 60.0


class TrialCosts:
    """Predictions of how long trials take, and of which take too long.

    A trial takes a constant time to start the script and build the engine, and the time of the
    warm-up steps and of the measured steps.
    """

    def __init__(self, plan: Plan, run: Run) -> None:
        start, end, _ = plan.measured.get("steps", (3, 7, 0))
        self._warm_up_steps = start - 1
        self._least_steps = end - start + 1
        self._plan, self._run = plan, run
        self._besides_s = deque[float](maxlen=_MOST_KEPT)
        self._steps = deque[int](maxlen=_MOST_KEPT)
        self._spent_s = 0.0
        # Seconds of a micro step, by strategy and micro batch.
        self._micro_steps: dict[Strategy, dict[int, float]] = defaultdict(dict)

    def update(self, trial: Trial, outcome: Outcome) -> None:
        strategy = read_strategy(self._plan.config(trial.overrides))
        if trial.kind is not TrialKind.FINAL and trial.id not in self._run.earlier:
            self._spent_s += self._cost_s(strategy, trial, outcome)
        if outcome.metrics is None:
            return
        step_s = outcome.metrics.latency / 1000
        steps = self._warm_up_steps + outcome.metrics.num_steps
        self._besides_s.append(max(0.0, outcome.duration_s - steps * step_s))
        self._steps.append(steps)
        self._micro_steps[strategy][trial.batch.micro_batch] = step_s / trial.batch.gas

    def _cost_s(self, strategy: Strategy, trial: Trial, outcome: Outcome) -> float:
        """Return a trial's share of the search's time, which simultaneous trials divide.

        A failure costs at most its predicted time, if known: it may have hung until its time limit,
        which later trials need not do.
        """
        duration_s = outcome.duration_s
        if outcome.metrics is None and self._steps:
            duration_s = min(duration_s, float(self.trial_s(self.step_s(strategy, trial.batch))))
        return duration_s / (1 + self._run.neighbours.get(trial.id, 0))

    def trial_s(self, step_s: Any) -> Any:
        """Return the seconds of a whole trial, given the seconds of an optimizer step."""
        if not self._steps:
            return (self._warm_up_steps + self._least_steps) * step_s
        return statistics.median(self._besides_s) + self._steps_of(step_s) * step_s

    def _steps_of(self, step_s: Any) -> Any:
        """Return the number of steps of a trial; if steps are slow, fewer are measured."""
        longest_s = self._run.longest_s(TrialKind.SEARCH)
        usual = statistics.median(self._steps) - self._warm_up_steps
        if longest_s is None:
            return self._warm_up_steps + usual
        affordable = longest_s / np.maximum(step_s, 1e-9)
        fewest = np.minimum(min(usual, self._least_steps), FEWEST_MAY_TAKE * affordable)
        measured = np.maximum(np.minimum(usual, affordable), fewest)
        return self._warm_up_steps + np.maximum(1.0, measured)

    def are_too_long(self, step_s: Any) -> Any:
        longest_s = self._run.longest_s(TrialKind.FINAL)
        most_s = math.inf if longest_s is None else max(TOO_LONG_S, longest_s) / self._least_steps
        return np.asarray(step_s) > most_s

    def are_unaffordable(self, step_s: Any) -> Any:
        """Return whether each trial exceeds the search's time left, or is too long for finals."""
        longest_s = max(_LONGEST * self._baseline_s, _LONGEST_S)
        return self.trial_s(step_s) > min(self.left_s, longest_s)

    @property
    def left_s(self) -> float:
        """Seconds left for the search; infinite if the user's own configuration did not run."""
        return max(_SEARCH * self._baseline_s, _SEARCH_S) - self._spent_s

    @property
    def _baseline_s(self) -> float:
        """Duration of the baseline in seconds; infinite if it did not run."""
        outcome = self._run.baseline and self._run.outcomes.get(self._run.baseline.id)
        return outcome.duration_s if outcome and outcome.ok else math.inf

    def step_s(self, strategy: Strategy, batch: BatchTriple) -> float:
        """Return a low estimate of the seconds of a step; 0 if the strategy was not measured.

        A smaller micro batch than a measured one takes at least as long per sample. Beyond the
        largest measured micro batch, time grows as it did between the two largest.
        """
        measured = sorted(self._micro_steps[strategy].items())
        if not measured:
            return 0.0
        size, growth = batch.micro_batch, 0.0
        larger = [step_s / samples for samples, step_s in measured if samples >= size]
        if larger:
            return batch.gas * max(size * rate for rate in larger)
        if len(measured) > 1:
            (previous, less_s), (last, more_s) = measured[-2:]
            growth = min(1.0, max(0.0, math.log(more_s / less_s) / math.log(last / previous)))
        return float(batch.gas * measured[-1][1] * (size / measured[-1][0]) ** growth)
