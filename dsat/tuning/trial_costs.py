"""Predicted duration of trials, from finished trials."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from dsat.search.speed import Layout, Points, SpeedModel
from dsat.search.step_time import Job, work
from dsat.search.threads import in_one_thread
from dsat.space.plan import Plan
from dsat.space.space import Space
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome
from dsat.values.trial import BatchTriple, Trial
from dsat.values.zero_strategy import Strategy, of_config

_MOST_KEPT = 64  # of the latest trials, what each took besides its steps
# Limits of one trial, which the finals repeat a few times, and of the whole search: times the
# user's own trial, and at least seconds.
_LONGEST, _LONGEST_S = 5.0, 20.0
_SEARCH, _SEARCH_S = 15.0, 60.0


class TrialCosts:
    """Predictions of how long trials take, and which would take too long.

    A trial takes the steps before those that are measured, these, and some time besides (the start
    of the script, making the engine).

    Args:
        plan: what is tuned.
        run: the run so far, its model profiled.
        space: what may be tried.
        predicts: whether anybody will ask for the steps of a configuration.
    """

    def __init__(self, plan: Plan, run: Run, space: Space, *, predicts: bool) -> None:
        start, end, _ = plan.measured.get("steps", (3, 7, 0))
        self._warm_up_steps = start - 1
        self._least_steps = end - start + 1
        self._plan, self._run = plan, run
        self._besides_s: list[float] = []
        self._steps: list[int] = []
        self._spent_s = 0.0
        self._strategies = space.strategies
        assert run.profile is not None
        self._job = Job.of_profile(
            run.profile, slots=space.slots, slots_per_host=space.freedom.slots_per_host
        )
        layout = Layout(self._job, space.strategies, num_values=0)
        self._speed = SpeedModel(layout) if predicts else None

    def update(self, trial: Trial, outcome: Outcome) -> None:
        """Update with the duration of a trial."""
        self._spent_s += outcome.duration_s
        if outcome.metrics is None:
            return
        step_s = outcome.metrics.latency / 1000
        steps = self._warm_up_steps + outcome.metrics.num_steps
        self._besides_s = [*self._besides_s, max(0.0, outcome.duration_s - steps * step_s)]
        self._besides_s = self._besides_s[-_MOST_KEPT:]
        self._steps = [*self._steps, steps][-_MOST_KEPT:]
        strategy = of_config(self._plan.config(trial.overrides))
        if self._speed is not None and strategy in self._strategies:
            zero = trial.overrides.get("zero_optimization", {})
            settings = {**zero, **trial.batch.parallelism.settings}
            points = self._points(strategy, settings, trial.batch)
            with_one_thread = in_one_thread(self._speed.update)
            with_one_thread(points, math.log(step_s), outcome.metrics.standard_error)

    def trial_s(self, step_s: Any) -> Any:
        """Seconds of whole trials, by the seconds of their optimizer steps (also an array)."""
        if not self._steps:
            return (self._warm_up_steps + self._least_steps) * step_s
        return statistics.median(self._besides_s) + statistics.median(self._steps) * step_s

    def are_too_long(self, step_s: Any) -> Any:
        """Return which trials would exceed the time limit, by the seconds of their steps."""
        longest_s = self._run.longest_s
        return self._least_steps * step_s > (math.inf if longest_s is None else longest_s)

    def are_unaffordable(self, step_s: Any) -> Any:
        """Return which trials cost more than a verdict may take, by the seconds of their steps.

        A verdict on a configuration needs further runs of it in the finals.
        """
        own = self._run.baseline and self._run.outcomes.get(self._run.baseline.id)
        if not own or not own.ok:
            return step_s > math.inf
        trial_s = self.trial_s(step_s)
        left_s = max(_SEARCH * own.duration_s, _SEARCH_S) - self._spent_s
        return trial_s > min(left_s, max(_LONGEST * own.duration_s, _LONGEST_S))

    def step_s(self, strategy: Strategy, settings: Mapping[str, Any], batch: BatchTriple) -> float:
        """At least about so many seconds an optimizer step takes; 0 if nothing is known."""
        if self._speed is None or not self._speed.points or strategy not in self._strategies:
            return 0.0
        mean, sd = self._speed.fit.predict(self._points(strategy, settings, batch))
        return math.exp(float(mean[0] - sd[0]))

    def _points(
        self, strategy: Strategy, settings: Mapping[str, Any], batch: BatchTriple
    ) -> Points:
        return Points(
            strategy=np.array([self._strategies.index(strategy)]),
            work=work(self._job, strategy, settings)[None, :],
            knobs=np.zeros((1, 0)),
            micro_batch=np.array([batch.micro_batch], float),
            gas=np.array([batch.gas], float),
            room=np.ones(1),
        )
