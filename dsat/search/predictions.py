"""Predicted speed, memory and failures of all configurations, fitted to the trials."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from dsat.search.base import Memory, Observation, Problem, Source, largest_micro_batch
from dsat.search.candidates import Row, Settings
from dsat.search.feasibility import Ended, Feasibility
from dsat.search.normal import Array
from dsat.search.speed import Points, Posterior, Prior
from dsat.search.speed import fit as fit_speed
from dsat.search.step_time import COLUMNS, Job
from dsat.space.locate import Point
from dsat.values.outcome import OutcomeKind


@dataclass
class History:
    """Trials of one choice of settings.

    Attributes:
        below: micro batch from which on nothing may be tried.
        abandoned: whether it failed in a way that no other micro batch would avoid.
    """

    sizes: set[int] = field(default_factory=set)
    ran: int = 0
    below: float = math.inf
    timeouts: int = 0
    abandoned: bool = False

    def add(self, micro_batch: int, ended: Ended) -> None:
        if ended.outcome.ok:
            self.ran = max(self.ran, micro_batch)
        elif ended.is_too_large:
            self.below = min(self.below, micro_batch)
            self.timeouts += ended.outcome.kind is OutcomeKind.TIMEOUT
            self.abandoned |= self.timeouts > 1
        else:
            self.abandoned = True

    def admits(self, micro_batch: int) -> bool:
        return not self.abandoned and micro_batch < self.below and micro_batch not in self.sizes

    def admits_any(self, micro_batches: Sequence[int]) -> bool:
        """Return whether any of some ascending micro batches may be tried."""
        smaller = itertools.takewhile(lambda size: size < self.below, micro_batches)
        return not self.abandoned and any(size not in self.sizes for size in smaller)


@dataclass(frozen=True)
class Configurations:
    """The configurations of a problem, in the form that the models use."""

    problem: Problem
    settings: Settings
    prior: Prior
    memory: Memory | None = None

    @classmethod
    def build(cls, problem: Problem) -> Configurations:
        space = problem.space
        hosts = space.freedom.slots_per_host
        job = Job.of_profile(problem.profile, slots=space.slots, slots_per_host=hosts)
        settings = Settings(space, job)
        return cls(problem, settings, Prior(job.hardware, settings.effects, settings.is_switch))

    @cached_property
    def sample_part(self) -> float:
        """Fraction of the device's memory that a sample takes."""
        profile = self.problem.profile
        return max(1, profile.activation_bytes_per_sample) / profile.slot_memory_bytes

    def edge(self, branch: int, index: int) -> float:
        """Return the largest micro batch that should fit, plus 0.5."""
        found = self._edges.get((branch, index))
        if found is None:
            settings = self.settings.of(branch, index)
            largest = largest_micro_batch(self.problem, self.memory, settings)
            found = self._edges[branch, index] = math.floor(largest) + 0.5
        return found

    @cached_property
    def _edges(self) -> dict[tuple[int, int], float]:
        """Cache of `edge`, for one decision: predictions of memory change from one to the next."""
        return {}

    def points(
        self,
        rows: Sequence[Row],
        where: Any,
        micro_batch: Array,
        gas: Array,
        edges: Sequence[float],
        neighbours: Any = 0,
    ) -> Points:
        """Return n configurations.

        Args:
            where: position of each configuration's settings in `rows`, (n,).
            micro_batch, gas: of each configuration, (n,).
            neighbours: trials that ran at the same time, (n,).
        """
        count, num_traits = len(rows), len(self.settings.effects)
        work = np.array([row.work for row in rows]).reshape(count, len(COLUMNS))
        traits = np.array([row.traits for row in rows]).reshape(count, num_traits)
        size = np.asarray(micro_batch, float)
        return Points(
            work=work[where],
            micro_batch=size,
            gas=np.asarray(gas, float),
            room=(np.array(edges)[where] - size) * self.sample_part,
            traits=self.settings.with_trial(
                traits[where], size, np.full(len(size), neighbours) == 0
            ),
        )

    def alone(self, points: Points) -> Points:
        """Return configurations as if nothing ran at the same time."""
        is_alone = np.ones(len(points), bool)
        traits = self.settings.with_trial(points.traits, points.micro_batch, is_alone)
        return replace(points, traits=traits)

    def log_work(self, points: Points) -> Array:
        """Return the logarithm of a rate plus that of its time, (n,); 0 for times."""
        groups = points.work[:, COLUMNS.index("data_parallel")]
        work: Array = np.log(points.micro_batch * points.gas * groups)
        return np.zeros(len(work)) if self.problem.objective.smaller_is_better else work

    def octaves(self, points: Points) -> Array:
        """Return log2 of the micro batches over the largest that should fit."""
        edges = points.room / self.sample_part + points.micro_batch
        octaves: Array = np.log2(points.micro_batch) - np.log2(np.maximum(edges, 0.5))
        return octaves


@dataclass(frozen=True)
class Predictions:
    """Predictions for all configurations.

    Attributes:
        histories: past trials of each choice of settings, by branch and index.
        measured: points that were measured.
        measured_points: the same in the form of the model of speed, as if each had run alone.
        running: running trials in that form.
        lacking: micro batches and accumulation steps from which on data are too few.
        log_unit: logarithm of the seconds of one unit of `speed`; None before anything ran.
    """

    configurations: Configurations
    speed: Posterior
    runs: Feasibility
    histories: Mapping[tuple[int, int], History]
    measured: Sequence[Point]
    measured_points: Points
    running: Points
    lacking: Sequence[tuple[int, int]]
    log_unit: float | None

    @classmethod
    def fit(cls, known: Configurations, observations: Sequence[Observation]) -> Predictions:
        problem, settings = known.problem, known.settings
        located = [
            (each.point, each)
            for each in observations
            if each.point is not None and each.source is not Source.FINAL
        ]
        points = locate_points(known, located)
        octaves = known.octaves(points).tolist()
        histories: dict[tuple[int, int], History] = defaultdict(History)
        ended, measured, lacking = [], [], []
        for place, (point, each) in enumerate(located):
            history = histories[point.branch, point.index]
            if each.is_exact:
                history.sizes.add(point.micro_batch)
            outcome = each.outcome
            if outcome is None:
                continue
            values = settings.row(point.branch, point.index).values
            ended.append(Ended(point.branch, values, octaves[place], outcome))
            if each.is_exact:
                history.add(point.micro_batch, ended[-1])
            if outcome.smaller_may_run:
                lacking.append((each.batch.micro_batch, each.batch.gas))
            if outcome.most_samples is not None:
                lacking.append((outcome.most_samples + 1, each.batch.gas))
            value = outcome.value(problem.objective)
            if value is not None and 0 < value < math.inf:
                measured.append(place)
        found = points.only(np.array(measured, int))
        outcomes = [located[place][1].outcome for place in measured]
        metrics = [outcome.metrics for outcome in outcomes if outcome and outcome.metrics]
        sign = 1 if problem.objective.smaller_is_better else -1
        values_of = np.array([m.value(problem.objective.metric) for m in metrics], float)
        log_s = known.log_work(found) + sign * np.log(values_of)
        errors = np.array([m.standard_error for m in metrics], float)
        units = np.log([m.latency / 1000 for m in metrics]) - log_s
        running = [place for place, (_, each) in enumerate(located) if each.outcome is None]
        return cls(
            known,
            fit_speed(known.prior, found, log_s, errors),
            Feasibility(
                ended,
                len(problem.space.branches),
                predicted=known.memory is not None,
                on_device=problem.profile.host_memory_bytes > 0,
            ),
            histories,
            [located[place][0] for place in measured],
            known.alone(found),
            points.only(np.array(running, int)),
            lacking,
            float(np.median(units)) if len(units) else None,
        )

    def seconds(self, log_s: Array) -> Array | None:
        """Return the seconds of predicted steps; None before anything was measured."""
        return None if self.log_unit is None else np.exp(log_s + self.log_unit)

    def log_rate(self, points: Points) -> Array:
        """Return predicted logarithms of the objective, (n,); larger is better."""
        rates: Array = self.configurations.log_work(points) - self.speed.predict(points)[0]
        return rates

    @cached_property
    def measured_rates(self) -> Array:
        """Predicted logarithms of what was measured, (n,), less noisy than the measurements."""
        return self.log_rate(self.measured_points)

    @cached_property
    def incumbent(self) -> tuple[Points, float] | None:
        """The best configuration so far by the model, and the logarithm of its rate."""
        if not self.measured:
            return None
        best = int(np.argmax(self.measured_rates))
        return self.measured_points.only(np.array([best])), float(self.measured_rates[best])

    def best_settings(self, branch: int) -> Mapping[str, Any]:
        """Return the best measured settings of a branch; of any, if it has none."""
        if not self.measured:
            return {}
        rates = self.measured_rates.copy()
        own = np.array([point.branch == branch for point in self.measured])
        if own.any():
            rates[~own] = -np.inf
        best = self.measured[int(np.argmax(rates))]
        return self.configurations.settings.of(best.branch, best.index)


def locate_points(known: Configurations, located: Sequence[tuple[Point, Observation]]) -> Points:
    """Return the trials that were made, with their batch sizes."""
    keys = list(dict.fromkeys((point.branch, point.index) for point, _ in located))
    place = {key: number for number, key in enumerate(keys)}
    return known.points(
        [known.settings.row(*key) for key in keys],
        np.array([place[point.branch, point.index] for point, _ in located], int),
        np.array([each.batch.micro_batch for _, each in located], float),
        np.array([each.batch.gas for _, each in located], float),
        [known.edge(*key) for key in keys],
        np.array([each.neighbours for _, each in located], int),
    )
