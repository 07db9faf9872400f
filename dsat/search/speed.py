"""Predicted seconds of an optimizer step, from the physical model and the trials so far.

    log t = log(physical model) + residual + noise

The physical model (`dsat.search.step_time`) has a handful of learned factors. What it does not know
is one Gaussian process over strategy, micro batch and settings: two configurations differ the more,
the more they have that is different. Measurements of one configuration differ by their own
intervals and by what runs vary. How large residuals and that noise are is what makes the
measurements most likely, so that noise is not mistaken for something to be found.

The fit is that of Gauss-Newton on all measurements; it keeps no state.

numpy only: the container of Determined's search runner has no SciPy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dsat.search import step_time
from dsat.search.normal import Array
from dsat.search.step_time import FACTORS, Hardware

_OCTAVE_SD = 0.03  # of the residuals of a micro batch and one twice as large
RUN_SD = 0.01  # of measurements from run to run, before any is known
_SCALE_SD = math.log(2.0)  # of the logarithms of all scales, before any measurement
_MOST = 64  # measurements that are fitted; the fastest and the latest tell of what is to come
_MANY, _WILD = 8, 3.0  # so many measurements tell which is wild, by standard deviations
_STEPS, _SETTLED = 20, 0.01  # of Gauss-Newton
_PARTS = np.append(0.5 ** np.arange(8), 0.0)  # of a step; the one that fits best is taken


@dataclass(frozen=True)
class Points:
    """Configurations, as arrays of one length n.

    Attributes:
        work: of `step_time.work`, (n, columns).
        micro_batch, gas: samples of a micro step and micro steps of a step.
        room: memory that is predicted to be left, as a fraction.
        traits: 1 for each value that a configuration has, of strategy and settings, (n, values).
    """

    work: Array
    micro_batch: Array
    gas: Array
    room: Array
    traits: Array

    def __len__(self) -> int:
        return len(self.micro_batch)

    def only(self, kept: Array) -> Points:
        """Return those at some positions."""
        return Points(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))

    @classmethod
    def of(cls, parts: Sequence[Points]) -> Points:
        """Return all of several, one after the other."""
        return cls(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in cls.__dataclass_fields__
            )
        )


@dataclass(frozen=True)
class Scales:
    """Sizes of what the physical model does not know, times what is expected."""

    residual: float = 1.0
    switch: float = 1.0
    noise: float = 1.0

    @property
    def log_prior(self) -> float:
        logs = np.log([self.residual, self.switch, self.noise])
        return float(-(logs @ logs) / (2 * _SCALE_SD**2))


@dataclass(frozen=True)
class Prior:
    """What is believed before any measurement.

    Attributes:
        hardware: of each slot.
        effects: standard deviation of the difference that each trait makes, (values,).
        is_switch: whether a trait acts on the whole step, as switches of a script do, (values,).
        factors: mean and standard deviation of the logarithms of the learned factors.
        level_sd: standard deviation of all residuals; no difference is much larger.
        growth_sd: of the part by which each doubling of the micro batch makes steps longer.
    """

    hardware: Hardware
    effects: Array
    is_switch: Array
    factors: Mapping[str, tuple[float, float]] = field(default_factory=lambda: FACTORS)
    level_sd: float = 0.5
    growth_sd: float = 0.03

    @property
    def mean(self) -> Array:
        return np.array([mean for mean, _ in self.factors.values()])

    @property
    def variance(self) -> Array:
        return np.array([sd**2 for _, sd in self.factors.values()])

    def residuals(self, one: Points, other: Points, scales: Scales) -> Array:
        """Return the covariance of the residuals of n and m configurations, (n, m).

        For small differences it is that of independent effects of all that differs.
        """
        scale = np.where(self.is_switch, scales.switch, scales.residual)
        weights = (scale * self.effects) ** 2 / 2  # a value that differs counts twice: both have it
        octaves, others = np.log2(one.micro_batch)[:, None], np.log2(other.micro_batch)
        distance = (one.traits @ weights)[:, None] + other.traits @ weights
        distance -= 2 * (one.traits * weights) @ other.traits.T
        distance += (scales.residual * _OCTAVE_SD) ** 2 * np.abs(octaves - others)
        covariance: Array = self.level_sd**2 * np.exp(-distance / (2 * self.level_sd**2))
        covariance += (scales.residual * self.growth_sd) ** 2 * octaves * others
        return covariance

    def variances(self, points: Points, scales: Scales) -> Array:
        """Return the variances of the residuals of n configurations, (n,)."""
        growth = scales.residual * self.growth_sd * np.log2(points.micro_batch)
        variances: Array = self.level_sd**2 + growth**2
        return variances

    def physical(self, theta: Array, points: Points) -> tuple[Array, Array]:
        """Return logarithms of seconds, (n,), and their derivatives, (n, factors)."""
        step = 1e-4
        found = self.log_s(np.vstack((theta, theta + step * np.eye(len(theta)))), points)
        return found[0], (found[1:] - found[0]).T / step

    def log_s(self, thetas: Array, points: Points) -> Array:
        """Return logarithms of seconds by m choices of the factors, (m, n)."""
        parts = points.work, points.micro_batch, points.gas, points.room
        return np.log(step_time.seconds(self.hardware, thetas.T[:, :, None], *parts))


@dataclass(frozen=True)
class Posterior:
    """Seconds of configurations after some measurements.

    Attributes:
        theta: logarithms of the learned factors.
        scales: of what is not known.
        measured: the n configurations.
        log_s, error: logarithms of their seconds, up to a constant, and the standard errors.
        predicted, slopes: logarithms by the physical model, and its derivatives, (n, factors).
        root: inverse of the Cholesky factor of their covariance, (n, n).
        weights: solution for what the prior mispredicted, (n,).
        likelihood: logarithm of that of the measurements and the scales.
    """

    prior: Prior
    theta: Array
    scales: Scales
    measured: Points
    log_s: Array
    error: Array
    predicted: Array
    slopes: Array
    root: Array
    weights: Array
    likelihood: float

    @classmethod
    def before(cls, prior: Prior) -> Posterior:
        """Return what is known before any measurement."""
        width, traits = len(step_time.COLUMNS), len(prior.effects)
        work, sizes = np.zeros((0, width)), np.zeros(0)
        none = Points(work, sizes, sizes, sizes, np.zeros((0, traits)))
        return fit(prior, none, np.zeros(0), np.zeros(0))

    @property
    def run_sd(self) -> float:
        """Standard deviation of measurements from run to run, as a fraction."""
        return RUN_SD * self.scales.noise

    @property
    def noise(self) -> float:
        """Standard deviation of a measurement, as a fraction."""
        return math.hypot(self.run_sd, float(np.median(self.error)) if len(self.error) else 0.0)

    def predict(self, points: Points, reference: Points | None = None) -> tuple[Array, Array]:
        """Predict the natural logarithm of the seconds.

        Args:
            points: n configurations.
            reference: one more; the uncertainty is of the difference to it.

        Returns:
            Mean and standard deviation, both (n,).
        """
        both = points if reference is None else Points.of([points, reference])
        prior, priors = self.prior, self.prior.variance
        mean, slopes = prior.physical(self.theta, both)
        residuals = prior.residuals(self.measured, both, self.scales)
        mean = mean + residuals.T @ self.weights
        known = self.root @ (residuals + (self.slopes * priors) @ slopes.T)
        variance = (slopes**2) @ priors + prior.variances(both, self.scales)
        variance -= (known**2).sum(axis=0)
        if reference is not None:
            shared = (slopes * priors) @ slopes[-1] - known.T @ known[:, -1]
            shared += prior.residuals(both, reference, self.scales)[:, 0]
            variance = (variance + variance[-1] - 2 * shared)[:-1]
            mean = mean[:-1]
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    def beside(self, points: Points) -> Posterior:
        """Return the posterior as if n configurations had been measured as predicted."""
        log_s = np.append(self.log_s, self.predict(points)[0])
        error = np.append(self.error, np.full(len(points), self.noise))
        both = Points.of([self.measured, points])
        return _condition(self.prior, self.theta, self.scales, both, log_s, error)


def fit(prior: Prior, points: Points, log_s: Array, error: Array) -> Posterior:
    """Fit to measurements.

    Args:
        points: n configurations that were measured, none or one or more times.
        log_s: natural logarithms of their seconds, up to a constant, (n,).
        error: standard errors of `log_s` by their own intervals, (n,).
    """
    if len(points) > _MOST:
        by_speed = np.argsort(log_s - np.log(points.micro_batch * points.gas), kind="stable")
        earlier = by_speed[by_speed < len(points) - _MOST // 2]
        kept = np.append(
            np.sort(earlier[: _MOST // 2]), np.arange(len(points) - _MOST // 2, len(points))
        )
        points, log_s, error = points.only(kept), log_s[kept], error[kept]
    found = _fit(prior, points, log_s, error)
    if len(points) < _MANY:
        return found
    # Each measurement by its prediction from all others (Rasmussen and Williams (2006), 5.4.2).
    precision = (found.root**2).sum(axis=0)
    apart = np.abs(found.weights) / precision
    is_wild = apart * np.sqrt(precision) > _WILD
    return (
        found if not is_wild.any() else _fit(prior, points, log_s, np.where(is_wild, apart, error))
    )


def _fit(prior: Prior, points: Points, log_s: Array, error: Array) -> Posterior:
    theta = prior.mean
    if len(points):
        theta[0] += float(np.median(log_s - prior.physical(theta, points)[0]))
    found = _newton(prior, theta, Scales(), points, log_s, error)
    if len(points) < 2:
        return found
    for name in ("noise", "residual", "switch", "noise", "residual"):
        if name == "switch" and not prior.is_switch.any():
            continue
        for times in (2.0, 0.5):
            while True:
                scale = times * getattr(found.scales, name)
                scales = replace(found.scales, **{name: scale})
                other = _condition(prior, found.theta, scales, points, log_s, error, found)
                if other.likelihood <= found.likelihood:
                    break
                found = other
    return _newton(prior, found.theta, found.scales, points, log_s, error)


def _newton(
    prior: Prior, theta: Array, scales: Scales, points: Points, log_s: Array, error: Array
) -> Posterior:
    """Return the posterior at the likeliest factors for given scales, by Gauss-Newton."""
    covariance = prior.residuals(points, points, scales)
    covariance[np.diag_indices(len(points))] += (RUN_SD * scales.noise) ** 2 + error**2
    root = np.linalg.inv(np.linalg.cholesky(covariance))
    for _ in range(_STEPS):
        predicted, slopes = prior.physical(theta, points)
        towards = root @ slopes
        gradient = towards.T @ (root @ (log_s - predicted)) - (theta - prior.mean) / prior.variance
        step = np.linalg.solve(towards.T @ towards + np.diag(1 / prior.variance), gradient)
        thetas = theta + _PARTS[:, None] * step
        squares = (((log_s - prior.log_s(thetas, points)) @ root.T) ** 2).sum(axis=1)
        squares += ((thetas - prior.mean) ** 2 / prior.variance).sum(axis=1)
        best = int(np.argmin(squares))
        theta = thetas[best]
        if np.abs(_PARTS[best] * step).max() < _SETTLED:
            break
    return _condition(prior, theta, scales, points, log_s, error)


def _condition(
    prior: Prior,
    theta: Array,
    scales: Scales,
    points: Points,
    log_s: Array,
    error: Array,
    at: Posterior | None = None,
) -> Posterior:
    """Return the posterior by the physical model's slopes at some factors."""
    predicted, slopes = (at.predicted, at.slopes) if at else prior.physical(theta, points)
    covariance = prior.residuals(points, points, scales) + (slopes * prior.variance) @ slopes.T
    covariance[np.diag_indices(len(points))] += (RUN_SD * scales.noise) ** 2 + error**2
    root = np.linalg.inv(np.linalg.cholesky(covariance))
    apart = root @ (log_s - predicted + slopes @ (theta - prior.mean))
    likelihood = float(np.log(np.diag(root)).sum() - apart @ apart / 2) + scales.log_prior
    return Posterior(
        prior,
        theta,
        scales,
        points,
        log_s,
        error,
        predicted,
        slopes,
        root,
        root.T @ apart,
        likelihood,
    )
