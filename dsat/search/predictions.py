"""What trials tell of the speed, the memory and the failures of all configurations of a space."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from dsat.search.candidates import Row, Settings
from dsat.search.feasibility import Ended, Feasibility
from dsat.search.normal import Array
from dsat.search.speed import Points, Posterior, Prior, fit
from dsat.search.step_time import COLUMNS, Job
from dsat.space.space import Space
from dsat.values.objective import Objective
from dsat.values.outcome import ModelProfile, Outcome, OutcomeKind
from dsat.values.zero_strategy import Strategy


@dataclass(frozen=True)
class Tried:
    """A configuration that was measured, or is being measured.

    Attributes:
        settings: as in a proposal.
        outcome: None while it runs.
        neighbours: trials that ran on the machine at the same time.
    """

    strategy: Strategy
    settings: Mapping[str, Any]
    micro_batch: int
    gas: int
    outcome: Outcome | None = None
    neighbours: int = 0


@dataclass
class History:
    """What was tried of one choice of settings.

    Attributes:
        sizes: micro batches.
        ran: the largest that ran.
        below: smaller ones alone may be tried.
        timeouts: number of trials that took too long.
        abandoned: it failed in a way that no other micro batch would avoid.
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


@dataclass(frozen=True)
class Problem:
    """What is searched.

    Attributes:
        profile: of the model.
        objective: the metric to optimise.
        space: what may be tried.
        largest: the largest micro batch that settings should allow, 0 if none.
        is_predicted: whether that is a prediction, and no bound from above.
    """

    profile: ModelProfile
    objective: Objective
    space: Space
    largest: Callable[[Mapping[str, Any]], float]
    is_predicted: bool

    @cached_property
    def job(self) -> Job:
        hosts = self.space.freedom.slots_per_host
        return Job.of_profile(self.profile, slots=self.space.slots, slots_per_host=hosts)

    @cached_property
    def settings(self) -> Settings:
        return Settings(self.space, self.job)

    @cached_property
    def prior(self) -> Prior:
        settings = self.settings
        return Prior(self.job.hardware, settings.effects, settings.is_switch)

    @cached_property
    def sample_part(self) -> float:
        """Part of the memory that a sample takes."""
        return max(1, self.profile.activation_bytes_per_sample) / self.profile.slot_memory_bytes

    def edge(self, settings: Mapping[str, Any]) -> float:
        """The largest micro batch that should fit; in the middle between it and the next."""
        return math.floor(self.largest(settings)) + 0.5

    def points(
        self,
        rows: Sequence[Row],
        where: Any,
        micro_batch: Array,
        gas: Array,
        edges: Sequence[float],
    ) -> Points:
        """Return n configurations.

        Args:
            rows: settings.
            where: position of each configuration's settings among them, (n,).
            micro_batch, gas: of each, (n,).
            edges: the largest micro batches of the settings.
        """
        none = np.zeros((0, len(COLUMNS))), np.zeros((0, len(self.settings.effects)))
        work, traits = (
            (np.stack(both) for both in zip(*((r.work, r.traits) for r in rows), strict=True))
            if rows
            else none
        )
        size = np.asarray(micro_batch, float)
        return Points(
            work=work[where],
            micro_batch=size,
            gas=np.asarray(gas, float),
            room=(np.array(edges)[where] - size) * self.sample_part,
            traits=self.settings.with_tiles(traits[where], size),
        )

    def log_work(self, points: Points) -> Array:
        """Return the offset between the logarithms of a rate and a time, (n,)."""
        groups = points.work[:, COLUMNS.index("data_parallel")]
        work: Array = np.log(points.micro_batch * points.gas * groups)
        return np.zeros(len(work)) if self.objective.smaller_is_better else work

    def octaves(self, points: Points) -> Array:
        """Octaves of the micro batches above the largest that should fit."""
        edges = points.room / self.sample_part + points.micro_batch
        octaves: Array = np.log2(points.micro_batch) - np.log2(np.maximum(edges, 0.5))
        return octaves


@dataclass(frozen=True)
class Predictions:
    """What is known of all configurations.

    Attributes:
        speed: predicted times.
        runs: which configurations run.
        histories: what was tried of each choice of settings, by strategy and values.
        measured: what was measured, with its points and the logarithms of its rates.
        running: what is being measured.
        lacking: micro batches and accumulation steps from which on data are lacking.
        log_unit: logarithm of the seconds of the unit of `speed`; None before anything ran.
    """

    problem: Problem
    speed: Posterior
    runs: Feasibility
    histories: Mapping[tuple[Strategy, Any], History]
    measured: Sequence[Tried]
    measured_points: Points
    running: Points
    lacking: Sequence[tuple[int, int]]
    log_unit: float | None

    @classmethod
    def of(cls, problem: Problem, tried: Sequence[Tried]) -> Predictions:
        """Return what trials tell, fitted to all of them."""
        rows = [problem.settings.row_of(each.strategy, each.settings) for each in tried]
        points = _points_of(problem, tried, rows)
        octaves = problem.octaves(points).tolist()
        histories: dict[tuple[Strategy, Any], History] = defaultdict(History)
        ended, measured, lacking = [], [], []
        strategies = list(problem.space.strategies)
        for place, (each, row) in enumerate(zip(tried, rows, strict=True)):
            history = histories[each.strategy, row.values]
            history.sizes.add(each.micro_batch)
            outcome = each.outcome
            if outcome is None:
                continue
            if each.strategy in strategies:
                at = strategies.index(each.strategy)
                ended.append(Ended(at, row.values, octaves[place], outcome))
                history.add(each.micro_batch, ended[-1])
            if outcome.smaller_may_run:
                lacking.append((each.micro_batch, each.gas))
            if outcome.most_samples is not None:
                lacking.append((outcome.most_samples + 1, 1))
            value = outcome.value(problem.objective)
            if value is not None and 0 < value < math.inf:
                measured.append(place)
        found = points.only(np.array(measured, int))
        outcomes = [tried[place].outcome for place in measured]
        metrics = [outcome.metrics for outcome in outcomes if outcome and outcome.metrics]
        sign = 1 if problem.objective.smaller_is_better else -1
        values = np.array([m.value(problem.objective.metric) for m in metrics], float)
        log_s = problem.log_work(found) + sign * np.log(values)
        errors = np.array([m.standard_error for m in metrics], float)
        units = np.log([m.latency / 1000 for m in metrics]) - log_s
        running = np.array([n for n, each in enumerate(tried) if each.outcome is None], int)
        return cls(
            problem,
            fit(problem.prior, found, log_s, errors),
            Feasibility(
                ended,
                len(strategies),
                predicted=problem.is_predicted,
                on_device=problem.profile.host_memory_bytes > 0,
            ),
            histories,
            [tried[place] for place in measured],
            found,
            points.only(running),
            lacking,
            float(np.median(units)) if len(units) else None,
        )

    def seconds(self, log_s: Array) -> Array | None:
        """Seconds of steps whose times are predicted; None before anything was measured."""
        return None if self.log_unit is None else np.exp(log_s + self.log_unit)

    def log_rate(self, points: Points) -> Array:
        """Return the predicted logarithms of the objective, larger is better, (n,)."""
        rates: Array = self.problem.log_work(points) - self.speed.predict(points)[0]
        return rates

    @cached_property
    def incumbent(self) -> tuple[Points, Mapping[str, Any], float] | None:
        """The best by the model, which noise misleads less, its settings and its log rate."""
        points = self.measured_points
        if not len(points):
            return None
        rates = self.log_rate(points)
        best = int(np.argmax(rates))
        return points.only(np.array([best])), self.measured[best].settings, float(rates[best])

    def best_settings(self, strategy: Strategy) -> Mapping[str, Any]:
        """The settings of the best that was measured of a strategy, or else of any."""
        if not self.measured:
            return {}
        rates = self.log_rate(self.measured_points)
        own = np.array([each.strategy == strategy for each in self.measured])
        if own.any():
            rates[~own] = -np.inf
        return self.measured[int(np.argmax(rates))].settings


def _points_of(problem: Problem, tried: Sequence[Tried], rows: Sequence[Row]) -> Points:
    edges: dict[Any, float] = {}
    for each, row in zip(tried, rows, strict=True):
        key = each.strategy, row.values
        if key not in edges:
            edges[key] = problem.edge(each.settings)
    return problem.points(
        rows,
        np.arange(len(tried)),
        np.array([each.micro_batch for each in tried], float),
        np.array([each.gas for each in tried], float),
        [edges[each.strategy, row.values] for each, row in zip(tried, rows, strict=True)],
    )
