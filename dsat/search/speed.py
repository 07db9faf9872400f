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

# Of the residuals of a micro batch and one twice as large. Without it, the worst replay ends at
# 96.5 % and not at 97.2 % (see `choice`).
_OCTAVE_SD = 0.03
RUN_SD = 0.01  # of measurements from run to run; its scale is learned
# Of the logarithms of all scales, before any measurement: a factor of three. With a factor of two,
# replays take 290 trials and not 256, and end 0.1 points lower.
_SCALE_SD = 1.2
# Measurements to fit, to bound the time of a decision: the fastest and the latest.
_MOST = 64
_MANY, _WILD = 8, 3.0  # measurements that reveal an outlier, and its standard deviations
_STEPS, _SETTLED = 20, 0.01  # of Gauss-Newton
_PARTS = np.append(0.5 ** np.arange(8), 0.0)  # of a step; the one that fits best is used


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
    def join(cls, parts: Sequence[Points]) -> Points:
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
        level_sd: standard deviation of all residuals; no difference is much larger. Ten times as
            much changes no replay by 0.1 points.
        growth_sd: of the part by which each doubling of the micro batch makes steps longer. Without
            it, replays end 0.1 points lower.
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

    def covariance(self, one: Points, other: Points, scales: Scales) -> Array:
        """Return the covariance of the residuals of n and m configurations, (n, m).

        For small differences it is that of independent effects of all that differs.
        """
        octaves, others = np.log2(one.micro_batch)[:, None], np.log2(other.micro_batch)
        sizes = self.effects * np.where(self.is_switch, scales.switch, scales.residual)
        weights = sizes**2 / 2  # a value that differs counts twice: both have it
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
class Measurements:
    """Measured configurations.

    Attributes:
        prior: what is believed of them.
        points: n configurations, which may be equal.
        log_s: logarithms of their seconds, up to a constant, (n,).
        error: standard errors of `log_s` by their own intervals, (n,).
    """

    prior: Prior
    points: Points
    log_s: Array
    error: Array

    def __len__(self) -> int:
        return len(self.points)

    def covariance(self, scales: Scales) -> Array:
        """Return the covariance of residuals and noise, (n, n)."""
        covariance = self.prior.covariance(self.points, self.points, scales)
        covariance[np.diag_indices(len(self))] += (RUN_SD * scales.noise) ** 2 + self.error**2
        return covariance

    def only(self, kept: Array) -> Measurements:
        return Measurements(self.prior, self.points.only(kept), self.log_s[kept], self.error[kept])


@dataclass(frozen=True)
class Posterior:
    """Seconds of configurations after n measurements.

    Attributes:
        theta: logarithms of the learned factors.
        scales: of what is not known.
        predicted, slopes: logarithms by the physical model, and its derivatives, (n, factors).
        root: inverse of the Cholesky factor of the covariance, (n, n).
        weights: solution for what the prior mispredicted, (n,).
        likelihood: logarithm of that of the measurements and the scales.
    """

    measured: Measurements
    theta: Array
    scales: Scales
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
        error = self.measured.error
        return math.hypot(self.run_sd, float(np.median(error)) if len(error) else 0.0)

    def predict(self, points: Points, reference: Points | None = None) -> tuple[Array, Array]:
        """Predict the natural logarithm of the seconds.

        Args:
            points: n configurations.
            reference: one more; the uncertainty is of the difference to it.

        Returns:
            Mean and standard deviation, both (n,).
        """
        prior, priors = self.measured.prior, self.measured.prior.variance
        mean, variance, slopes, known = self._project(points)
        if reference is not None:
            _, its_variance, its_slopes, its_known = self._project(reference)
            shared = slopes @ (priors * its_slopes[0]) - known.T @ its_known[:, 0]
            shared += prior.covariance(points, reference, self.scales)[:, 0]
            variance = variance + its_variance - 2 * shared
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    def _project(self, points: Points) -> tuple[Array, Array, Array, Array]:
        """Return mean, variance, slopes, and the part that the measurements explain, (n, m)."""
        prior, priors = self.measured.prior, self.measured.prior.variance
        mean, slopes = prior.physical(self.theta, points)
        residuals = prior.covariance(self.measured.points, points, self.scales)
        known = self.root @ (residuals + (self.slopes * priors) @ slopes.T)
        variance = slopes**2 @ priors + prior.variances(points, self.scales)
        variance -= (known**2).sum(axis=0)
        return mean + residuals.T @ self.weights, variance, slopes, known

    def beside(self, points: Points) -> Posterior:
        """Return the posterior as if n configurations had been measured as predicted."""
        known = self.measured
        both = Measurements(
            known.prior,
            Points.join([known.points, points]),
            np.append(known.log_s, self.predict(points)[0]),
            np.append(known.error, np.full(len(points), self.noise)),
        )
        return _condition(both, self.theta, self.scales)


def fit(prior: Prior, points: Points, log_s: Array, error: Array) -> Posterior:
    """Fit to measurements.

    Args:
        points: n configurations that were measured, none or one or more times.
        log_s: natural logarithms of their seconds, up to a constant, (n,).
        error: standard errors of `log_s` by their own intervals, (n,).
    """
    measured = Measurements(prior, points, log_s, error)
    if len(points) > _MOST:
        by_speed = np.argsort(log_s - np.log(points.micro_batch * points.gas), kind="stable")
        earlier = by_speed[by_speed < len(points) - _MOST // 2]
        latest = np.arange(len(points) - _MOST // 2, len(points))
        measured = measured.only(np.append(np.sort(earlier[: _MOST // 2]), latest))
    found = _fit(measured)
    if len(measured) < _MANY:
        return found
    # Each measurement by its prediction from all others (Rasmussen and Williams (2006), 5.4.2).
    precision = (found.root**2).sum(axis=0)
    apart = np.abs(found.weights) / precision
    is_wild = apart * np.sqrt(precision) > _WILD
    if not is_wild.any():
        return found
    return _fit(replace(measured, error=np.where(is_wild, apart, measured.error)))


def _fit(measured: Measurements) -> Posterior:
    prior, theta = measured.prior, measured.prior.mean
    if len(measured):
        predicted = prior.physical(theta, measured.points)[0]
        theta[0] += float(np.median(measured.log_s - predicted))
    found = _newton(measured, theta, Scales())
    if len(measured) < 2:
        return found
    for name in ("noise", "residual", "switch", "noise", "residual"):
        if name == "switch" and not prior.is_switch.any():
            continue
        for times in (2.0, 0.5):
            while True:
                scale = times * getattr(found.scales, name)
                other = _condition(
                    measured, found.theta, replace(found.scales, **{name: scale}), found
                )
                if other.likelihood <= found.likelihood:
                    break
                found = other
    return _newton(measured, found.theta, found.scales)


def _newton(measured: Measurements, theta: Array, scales: Scales) -> Posterior:
    """Return the posterior at the likeliest factors for given scales, by Gauss-Newton."""
    prior, points, log_s = measured.prior, measured.points, measured.log_s
    root = np.linalg.inv(np.linalg.cholesky(measured.covariance(scales)))
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
    return _condition(measured, theta, scales)


def _condition(
    measured: Measurements, theta: Array, scales: Scales, at: Posterior | None = None
) -> Posterior:
    """Return the posterior by the physical model's slopes at some factors.

    Args:
        at: a posterior with the same factors, whose slopes are used.
    """
    prior = measured.prior
    predicted, slopes = (at.predicted, at.slopes) if at else prior.physical(theta, measured.points)
    covariance = measured.covariance(scales) + (slopes * prior.variance) @ slopes.T
    root = np.linalg.inv(np.linalg.cholesky(covariance))
    apart = root @ (measured.log_s - predicted + slopes @ (theta - prior.mean))
    likelihood = float(np.log(np.diag(root)).sum() - apart @ apart / 2) + scales.log_prior
    return Posterior(measured, theta, scales, predicted, slopes, root, root.T @ apart, likelihood)
