"""Predicted step times of traced configurations on one type of GPU, with intervals.

The terms of the physical model (`dsat.search.step_time`) come from the table of GPUs. Measured
trials, on the same or another type, correct the terms and narrow the intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dsat.projecting.traced_work import PRIORS
from dsat.search.normal import Array
from dsat.search.speed import Points, Posterior, Prior, fit
from dsat.search.step_time import COLUMNS, FACTORS, Hardware
from dsat.values.zero_strategy import Strategy

# Standard deviations of the logarithm of step time that the learned factors do not explain: for one
# configuration, between two strategies, and between two types of GPU.
_SD, _STRATEGY_SD, _OTHER_GPU_SD = 0.05, 0.03, 0.10
_NORMAL_90 = 1.645
# Columns of `step_time` that make up each part of a step; the rest is kernels and launches.
_PARTS = {
    "communication": ("reduced", "reduced_last", "reductions", "waited", "gathered", "boundary"),
    "optimizer": ("optimizer", "groups", "host_optimizer"),
    "copies": ("copies", "transferred", "transferred_last"),
}
_HOST = ("launches", "hooks")


@dataclass(frozen=True)
class StepTime:
    """A predicted optimizer step.

    Attributes:
        seconds: duration of the step.
        low_s, high_s: ends of the 90 % interval.
        parts: seconds by part: `kernels`; `launches`, by which the host is slower than the kernels;
            `communication` that no computation hides; `optimizer`; `copies`.
    """

    seconds: float
    low_s: float
    high_s: float
    parts: dict[str, float]


class ProjectedSpeed:
    """Predictions for one type of GPU.

    Args:
        hardware: speed of the GPU.
        strategies: all strategies to predict, and the strategies of measured trials.
    """

    def __init__(self, hardware: Hardware, strategies: Sequence[Strategy]) -> None:
        self._strategies = list(strategies)
        effects = np.full(len(self._strategies), _STRATEGY_SD)
        self._prior = Prior(hardware, effects, PRIORS, _SD, growth_sd=0.0)
        self._posterior = Posterior.before(self._prior)
        self._gpu_sd = 0.0

    def calibrated(
        self, measured_on: Hardware, points: Points, log_s: Array, error: Array
    ) -> ProjectedSpeed:
        """Return a copy whose predictions are corrected by n trials.

        Args:
            measured_on: the hardware of the trials.
            points: their configurations, made by the method `points`.
            log_s: natural logarithms of their step times in seconds, (n,).
            error: standard errors of `log_s`, (n,).
        """
        hardware = self._prior.hardware
        speed = ProjectedSpeed(hardware, self._strategies)
        # Only trials show what part of the peak the script reaches: use the search's prior for it.
        unknown = {**PRIORS, "compute": FACTORS["compute"]}
        measured_prior = replace(self._prior, hardware=measured_on, factors=unknown)
        posterior = fit(measured_prior, points, log_s, error)
        moved = replace(posterior.measured, prior=replace(measured_prior, hardware=hardware))
        speed._posterior = replace(posterior, measured=moved)
        speed._gpu_sd = _OTHER_GPU_SD if measured_on != hardware else 0.0
        return speed

    def points(self, work: Array, strategy: Strategy, micro_batch: int, gas: int) -> Points:
        """Return one configuration as arrays; `work` is the result of `traced_work.work_of`."""
        return Points(
            work=work[None, :],
            micro_batch=np.array([float(micro_batch)]),
            gas=np.array([float(gas)]),
            room=np.ones(1),
            traits=np.eye(len(self._strategies))[[self._strategies.index(strategy)]],
        )

    def predict(self, points: Points) -> StepTime:
        """Predict the step of one configuration."""
        mean, sd = self._posterior.predict(points)
        spread = math.exp(_NORMAL_90 * math.hypot(float(sd[0]), self._gpu_sd))
        seconds = math.exp(mean[0])
        return StepTime(seconds, seconds / spread, seconds * spread, self._parts(points, seconds))

    def _parts(self, points: Points, seconds: float) -> dict[str, float]:
        """Return the seconds of each part, found by removing one part's columns after another."""
        rest, earlier_s, parts = points, self._physical(points), {}
        scale = seconds / earlier_s
        for name, columns in _PARTS.items():
            rest = _drop_columns(rest, columns)
            later_s = self._physical(rest)
            parts[name] = scale * (earlier_s - later_s)
            earlier_s = later_s
        kernels = min(earlier_s, self._physical(_drop_columns(rest, _HOST)))
        return {"kernels": scale * kernels, "launches": scale * (earlier_s - kernels), **parts}

    def _physical(self, points: Points) -> float:
        posterior = self._posterior
        return float(posterior.measured.prior.terms(points).seconds(posterior.theta)[0])


def _drop_columns(points: Points, columns: Sequence[str]) -> Points:
    work = points.work.copy()
    work[:, [COLUMNS.index(name) for name in columns]] = 0.0
    return replace(points, work=work)
