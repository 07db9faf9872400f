"""Predicted speed and probability to run of all configurations, fitted to the trials."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from dsat.search.base import Observation
from dsat.search.configurations import GROUPS, Configurations, Key
from dsat.search.feasibility import Ended, Feasibility
from dsat.search.normal import Array
from dsat.search.speed import Points
from dsat.search.speed import fit as fit_speed
from dsat.values.outcome import OutcomeKind

# Most measurements that are fitted, since a fit takes time with the cube of their number. With
# 1,000, a decision takes a second.
_MOST_FITTED = 64


@dataclass
class History:
    """Trials of one combination of settings.

    Attributes:
        sizes: micro batches that were tried.
        ran: the largest micro batch that ran; 0 if none did.
        below: only micro batches smaller than this may be tried; 0 after two timeouts or another
            kind of error.
    """

    sizes: set[int] = field(default_factory=set)
    ran: int = 0
    below: float = math.inf
    timeouts: int = 0

    def add(self, micro_batch: int, ended: Ended) -> None:
        if ended.outcome.ok:
            self.ran = max(self.ran, micro_batch)
        elif ended.is_too_large:
            self.timeouts += ended.outcome.kind is OutcomeKind.TIMEOUT
            self.below = min(self.below, micro_batch if self.timeouts < 2 else 0)
        else:
            self.below = 0

    def admits(self, micro_batch: int) -> bool:
        return micro_batch < self.below and micro_batch not in self.sizes

    def admits_any(self, micro_batches: Sequence[int]) -> bool:
        """Return whether any of these micro batches (ascending) may be tried."""
        smaller = itertools.takewhile(lambda size: size < self.below, micro_batches)
        return any(size not in self.sizes for size in smaller)


class Predictions:
    """Predictions for all configurations.

    Attributes:
        histories: past and running trials of each combination of settings.
        count: number of measurements.
        measured: settings of the measurements that are fitted; see `_select_fitted`.
        measured_points: the fitted configurations as `Points`, as if each had run alone.
        running: running trials as `Points`.
        lacking: pairs of micro batch and accumulation steps that need more samples than there are,
            as do all pairs that are at least as large in both.
        log_unit: log seconds of a step at a log time of 0 in `speed`; None before any measurement.
    """

    def __init__(self, configurations: Configurations, observations: Sequence[Observation]) -> None:
        self.configurations = configurations
        self.histories: dict[Key, History] = defaultdict(History)
        self.lacking: list[tuple[int, int]] = []
        objective, profile = configurations.problem.objective, configurations.problem.profile
        ended, measured, running = [], [], []
        values, errors, latencies_s = [], [], []
        located = [o for o in observations if o.point is not None]
        keys = _list_keys(located)
        octaves = configurations.octaves(keys, [o.batch.micro_batch for o in located])
        for observation, key, octave in zip(located, keys, octaves.tolist(), strict=True):
            history, outcome = self.histories[key], observation.outcome
            if observation.is_exact:
                history.sizes.add(observation.batch.micro_batch)
            if outcome is None:
                running.append(observation)
                continue
            ended.append(Ended(key[0], configurations.row(key).values, octave, outcome))
            if observation.is_exact:
                history.add(observation.batch.micro_batch, ended[-1])
            if outcome.smaller_may_run:
                self.lacking.append((observation.batch.micro_batch, observation.batch.gas))
            if outcome.most_samples is not None:
                self.lacking.append((outcome.most_samples + 1, observation.batch.gas))
            value = outcome.value(objective)
            if value is not None and 0 < value < math.inf:
                assert outcome.metrics is not None
                measured.append(observation)
                values.append(objective.log_value(value))
                errors.append(outcome.metrics.standard_error)
                latencies_s.append(outcome.metrics.latency / 1000)
        self.count = len(measured)
        fitted = _select_fitted(np.array(values))
        measured = [measured[position] for position in fitted]
        log_values, fitted_errors, steps_s = np.array([values, errors, latencies_s])[:, fitted]
        self.measured = _list_keys(measured)
        self.running, points = _locate(configurations, running), _locate(configurations, measured)
        log_s = configurations.log_work(points) - log_values
        self.speed = fit_speed(configurations.prior, points, log_s, fitted_errors)
        on_device = profile.host_memory_bytes > 0
        count, predicted = (
            len(configurations.problem.space.branches),
            configurations.memory is not None,
        )
        self.runs = Feasibility(ended, count, predicted=predicted, on_device=on_device)
        alone = points.traits.copy()
        alone[:, -1] = 1.0
        self.measured_points = replace(points, traits=alone)
        units = np.log(steps_s) - log_s
        self.log_unit = float(np.median(units)) if measured else None

    def seconds(self, log_s: Array) -> Array | None:
        """Convert predicted log times to seconds of a step; None before anything was measured."""
        return None if self.log_unit is None else np.exp(log_s + self.log_unit)

    def log_rate(self, points: Points) -> Array:
        """Return the predicted log of the objective, up to a constant, (n,); larger is better."""
        rates: Array = self.configurations.log_work(points) - self.speed.predict(points)[0]
        return rates

    @cached_property
    def measured_rates(self) -> Array:
        """Predicted `log_rate` of the measured configurations, (n,)."""
        return self.log_rate(self.measured_points)

    @cached_property
    def incumbent(self) -> tuple[Points, float] | None:
        """The measured configuration with the best `log_rate`, and that rate; None without one."""
        if not self.measured:
            return None
        best = int(np.argmax(self.measured_rates))
        return self.measured_points.only(np.array([best])), float(self.measured_rates[best])

    def best_settings(self, branch: int) -> Mapping[str, Any]:
        """Return the best measured settings of a branch, or else of any branch; empty if none."""
        if not self.measured:
            return {}
        rates = self.measured_rates.copy()
        is_of_branch = np.array([key[0] == branch for key in self.measured])
        if is_of_branch.any():
            rates[~is_of_branch] = -np.inf
        return self.configurations.settings_of(self.measured[int(np.argmax(rates))])

    @property
    def best_sizes(self) -> list[float]:
        """A list with the micro batch of the best configuration so far; empty without one."""
        best = self.incumbent
        return [] if best is None else [float(best[0].micro_batch[0])]

    def is_closed(self, key: Key) -> bool:
        """Return whether past trials exclude every micro batch with these settings."""
        history = self.histories.get(key)
        sizes = self.configurations.problem.space.micro_batches
        return history is not None and not history.admits_any(sizes)

    def find_open(self, key: Key, sizes: Array) -> Array:
        """Return a mask of the micro batches that may be tried with the given settings, (n,)."""
        configurations, history = self.configurations, self.histories.get(key)
        most = math.inf if configurations.memory is None else configurations.edge(key)
        is_open: Array = sizes <= most
        if history is not None:
            is_open &= [history.admits(size) for size in sizes.tolist()]
        if self.lacking:
            row = configurations.row(key)
            gas = configurations.problem.space.accumulation(sizes, row.work[GROUPS], row.gas)
            for size, steps in self.lacking:
                is_open &= ~((sizes >= size) & (gas >= steps))
        return is_open

    def log_runs(self, keys: Sequence[Key], points: Points) -> Array:
        """Return the log probability to run of configurations with these settings, (n,)."""
        configurations = self.configurations
        branches = np.array([branch for branch, _ in keys])
        fits = np.log(self.runs.fits(branches, configurations.octaves(keys, points.micro_batch)))
        ran = np.array([self.histories[key].ran if key in self.histories else 0 for key in keys])
        fits[points.micro_batch < ran] = 0.0
        sound = {key: self.runs.runs(configurations.row(key).values) for key in {*keys}}
        log_runs: Array = fits + np.log([sound[key] for key in keys])
        return log_runs


def _select_fitted(values: Array) -> Array:
    """Return the positions of the measurements to fit: the latest, and the best earlier ones."""
    earlier = max(0, len(values) - _MOST_FITTED // 2)
    best = np.argsort(values[:earlier])[-_MOST_FITTED // 2 :]
    return np.append(np.sort(best), np.arange(earlier, len(values)))


def _list_keys(trials: Sequence[Observation]) -> list[Key]:
    return [(trial.point.branch, trial.point.index) for trial in trials if trial.point is not None]


def _locate(configurations: Configurations, trials: Sequence[Observation]) -> Points:
    """Return trials as `Points`: the settings of their points, but their actual batch sizes."""
    return configurations.points(
        _list_keys(trials),
        np.array([trial.batch.micro_batch for trial in trials], float),
        np.array([trial.batch.gas for trial in trials], float),
        np.array([trial.neighbours == 0 for trial in trials], bool),
    )
