"""Predictions of speed and feasibility for all configurations of a space, from the outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dsat.search.candidates import Settings
from dsat.search.feasibility import Feasibility
from dsat.search.normal import Array
from dsat.search.speed import Fit, Layout, Points, SpeedModel
from dsat.search.step_time import COLUMNS, Job
from dsat.space.space import Space
from dsat.values.objective import Objective
from dsat.values.outcome import ModelProfile, Outcome

_UNTRIED_SD = 0.01  # of a configuration beside the model, although the model fits what was tried


class Predictions:
    """Models of speed, memory and failures.

    Configurations are named by the numbers of a branch, of settings in it, and a micro batch.

    Args:
        profile: of the model.
        objective: the metric to optimise.
        space: what may be tried.
        largest: the largest micro batch that settings should allow, 0 if none.
        predicted: whether that is a prediction, and no bound from above.

    Attributes:
        settings: of the space, by their numbers.
        speed: the model of speed, and what was measured.
        measured: branch and settings of each of `speed.measured`.
    """

    def __init__(
        self,
        profile: ModelProfile,
        objective: Objective,
        space: Space,
        largest: Callable[[Mapping[str, Any]], float],
        *,
        predicted: bool,
    ) -> None:
        job = Job.of_profile(
            profile, slots=space.slots, slots_per_host=space.freedom.slots_per_host
        )
        self.settings = Settings(space, job)
        settings = self.settings
        layout = Layout(job, space.strategies, settings.num_values, of_whole=settings.of_whole)
        self.speed = SpeedModel(layout)
        self._objective, self._space, self._largest = objective, space, largest
        on_device = profile.host_memory_bytes > 0
        count = len(space.branches)
        self._feasibility = Feasibility(count, predicted=predicted, on_device=on_device)
        # Of the memory, what a sample takes.
        self._sample_part = max(1, profile.activation_bytes_per_sample) / profile.slot_memory_bytes
        self._log_units: list[float] = []  # what makes seconds of the model's unit, by outcome
        self.measured: list[tuple[int, int]] = []

    def update(self, branch: int, index: int, micro_batch: int, outcome: Outcome, gas: int) -> None:
        """Take in the end of a trial, with its own accumulation steps."""
        points = self.points(branch, [index], np.array([0]), np.array([micro_batch]))
        points = replace(points, gas=np.array([float(gas)]))
        octaves = float(self._octaves(points)[0])
        values = self.settings.row(branch, index).values
        self._feasibility.update(branch, values, octaves, outcome)
        value = outcome.value(self._objective)
        if value is None or not 0 < value < math.inf:
            return
        assert outcome.metrics is not None
        sign = 1 if self._objective.smaller_is_better else -1
        log_s = float(self.log_work(points)[0]) + sign * math.log(value)
        self.speed.update(points, log_s, outcome.metrics.standard_error)
        self._log_units.append(math.log(outcome.metrics.latency / 1000) - log_s)
        self.measured.append((branch, index))

    def points(
        self,
        branch: int,
        numbers: Sequence[int],
        where: Array,
        micro_batch: Array,
        edges: Sequence[float] | None = None,
    ) -> Points:
        """Return n configurations of a branch.

        Args:
            numbers: of settings.
            where: position in `numbers` of each configuration's settings, (n,).
            micro_batch: of each, (n,).
            edges: `edge` of the settings, if it is known already.
        """
        rows = [self.settings.row(branch, number) for number in numbers]
        most = np.array(edges or [self.edge(branch, number) for number in numbers])
        gas = np.ones(len(where))
        for position, number in enumerate(numbers):
            here = where == position
            settings = self.settings.of(branch, number)
            gas[here] = self._space.accumulation(micro_batch[here], settings)
        return Points(
            strategy=np.full(len(where), branch),
            work=np.stack([row.work for row in rows])[where],
            knobs=np.stack([row.knobs for row in rows])[where],
            micro_batch=micro_batch.astype(float),
            gas=gas,
            room=(most[where] - micro_batch) * self._sample_part,
        )

    def edge(self, branch: int, index: int) -> float:
        """The largest micro batch that should fit; in the middle between it and the next."""
        return math.floor(self._largest(self.settings.of(branch, index))) + 0.5

    def log_work(self, points: Points) -> Array:
        """Return the offset between the logarithms of a rate and a time, (n,)."""
        groups = points.work[:, COLUMNS.index("data_parallel")]
        work: Array = np.log(points.micro_batch * points.gas * groups)
        return np.zeros(len(work)) if self._objective.smaller_is_better else work

    def log_rate(self, points: Points) -> Array:
        """Return the predicted logarithms of the objective, larger is better, (n,)."""
        rates: Array = self.log_work(points) - self.speed.fit.log_s(points)
        return rates

    def seconds(self, log_s: Array) -> Array | None:
        """Seconds of steps whose times are predicted; None before anything was measured."""
        if not self._log_units:
            return None
        seconds: Array = np.exp(log_s + float(np.median(self._log_units)))
        return seconds

    def log_runs(
        self, branch: int, points: Points, numbers: Sequence[int], where: Array
    ) -> tuple[Array, Array]:
        """Logarithms of the chances to have enough memory, and to run for all else, (n,) both.

        Args:
            points, numbers, where: as of `points`.
        """
        fits = np.log(self._feasibility.fits(branch, self._octaves(points)))
        sound = [self._feasibility.runs(self.settings.row(branch, n).values) for n in numbers]
        return fits, np.log(sound)[where]

    def learnable(self, fit: Fit, sd: Array) -> Array:
        """By how much a trial will move the prediction of its configuration, (n,).

        A measurement is as uncertain as those before it, so it tells little of what is known better
        than that (the knowledge gradient's standard deviation: Frazier, Powell and Dayanik, SIAM J.
        Control Optim. 47 (2008)).
        """
        variance = sd**2 + fit.misfit**2 + _UNTRIED_SD**2
        moved: Array = variance / np.sqrt(variance + fit.noise**2)
        return moved

    def incumbent(self, running: Sequence[Points]) -> tuple[Points | None, float]:
        """The best by the model, which noise misleads less, and the logarithm of its rate."""
        points = self.speed.measured
        if points is None and running:
            points = Points.of(running)
        if points is None:
            return None, 0.0
        rates = self.log_rate(points)
        best = int(np.argmax(rates))
        return points.only(np.array([best])), float(rates[best])

    def best_settings(self, branch: int) -> Mapping[str, Any]:
        """The settings of the best that was measured in a branch, or else in any."""
        points = self.speed.measured
        if points is None:
            return {}
        rates: Array = self.log_work(points) - np.array(self.speed.log_s)
        own = points.strategy == branch
        if own.any():
            rates[~own] = -np.inf
        return self.settings.of(*self.measured[int(np.argmax(rates))])

    def _octaves(self, points: Points) -> Array:
        """Octaves of the micro batches above the largest that should fit."""
        edges = points.room / self._sample_part + points.micro_batch
        octaves: Array = np.log2(points.micro_batch) - np.log2(np.maximum(edges, 0.5))
        return octaves
