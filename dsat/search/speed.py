"""Predicted seconds of an optimizer step, from the physical model and the trials so far.

    log t = log(physical model) + residual + noise

The physical model (`dsat.search.step_time`) has a handful of learned factors. The
residual is one Gaussian process over strategy, micro batch and settings: the more two
configurations differ, the more their residuals may. Measurements of one configuration differ by
their own intervals and by run-to-run variation. The sizes of residuals and noise are those that
make the measurements most likely, so noise is not mistaken for a gain.

Every fit is a Gauss-Newton fit to all measurements; it keeps no state.

numpy only: the container of Determined's search runner has no SciPy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

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
_STEPS, _SETTLED = 20, 0.01  # of Gauss-Newton


@dataclass(frozen=True)
class Points:
    """Configurations, as arrays of one length n.

    Attributes:
        micro_batch, gas: samples of a micro step and micro steps of a step.
        room: memory that is predicted to be left, as a fraction of the device's.
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
        return Points(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))

    @classmethod
    def join(cls, parts: Sequence[Points]) -> Points:
        return cls(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in cls.__dataclass_fields__
            )
        )


@dataclass(frozen=True)
class Scales:
    """Learned scales, times the prior's standard deviations."""

    residual: float = 1.0
    switch: float = 1.0
    noise: float = 1.0

    @property
    def log_prior(self) -> float:
        logs = np.log([self.residual, self.switch, self.noise])
        return float(-(logs @ logs) / (2 * _SCALE_SD**2))


@dataclass(frozen=True)
class Differences:
    """Differences of n and m configurations, (n, m), with scales of 1.

    Attributes:
        residual, switch: variances of what settings and micro batches, and switches, make of a
            step.
        growth: covariance of what larger micro batches make of it.
    """

    residual: Array
    switch: Array
    growth: Array


@dataclass(frozen=True)
class Prior:
    """The model before any measurement.

    Attributes:
        effects: standard deviation of the difference that each trait makes, (values,).
        is_switch: whether a trait acts on the whole step, as switches of a script do, (values,).
        factors: mean and standard deviation of the logarithms of the learned factors.
        level_sd: standard deviation of all residuals, which bounds differences. Ten times as much
            changes no replay by 0.1 points.
        growth_sd: standard deviation of the change of a step per doubling of the micro batch.
            Without it, replays end 0.1 points lower.
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

    def compare(self, one: Points, other: Points) -> Differences:
        """Return the differences of n and m configurations."""
        octaves, others = np.log2(one.micro_batch)[:, None], np.log2(other.micro_batch)

        def squares(kept: Array) -> Array:
            weights = self.effects[kept] ** 2 / 2  # a value that differs counts twice: both have it
            ones, its = one.traits[:, kept], other.traits[:, kept]
            distance: Array = (ones @ weights)[:, None] + its @ weights
            distance -= 2 * (ones * weights) @ its.T
            return distance

        settings = squares(~self.is_switch) + _OCTAVE_SD**2 * np.abs(octaves - others)
        growth = self.growth_sd**2 * octaves * others
        return Differences(settings, squares(self.is_switch), growth)

    def covariance(self, differences: Differences, scales: Scales) -> Array:
        """Return the covariance of the residuals of n and m configurations, (n, m).

        For small differences it is that of independent effects of all that differs.
        """
        distance = scales.residual**2 * differences.residual
        distance += scales.switch**2 * differences.switch
        covariance: Array = self.level_sd**2 * np.exp(-distance / (2 * self.level_sd**2))
        covariance += scales.residual**2 * differences.growth
        return covariance

    def variances(self, points: Points, scales: Scales) -> Array:
        """Return the prior variances of residuals, (n,)."""
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
        log_s: logarithms of their seconds, up to a constant, (n,).
        error: standard errors of `log_s` by their own intervals, (n,).
    """

    prior: Prior
    points: Points
    log_s: Array
    error: Array

    def __len__(self) -> int:
        return len(self.points)

    @cached_property
    def _differences(self) -> Differences:
        return self.prior.compare(self.points, self.points)

    def covariance(self, scales: Scales) -> Array:
        """Return the covariance of residuals and noise, (n, n)."""
        covariance = self.prior.covariance(self._differences, scales)
        covariance[np.diag_indices(len(self))] += (RUN_SD * scales.noise) ** 2 + self.error**2
        return covariance

    def only(self, kept: Array) -> Measurements:
        return Measurements(self.prior, self.points.only(kept), self.log_s[kept], self.error[kept])


@dataclass(frozen=True)
class Posterior:
    """Seconds of configurations after n measurements.

    Attributes:
        scales: learned scales.
        slopes: derivatives of the logarithms by the physical model, (n, factors).
        root: inverse of the Cholesky factor of the covariance, (n, n).
        weights: solution for the prior's errors, (n,).
    """

    measured: Measurements
    theta: Array
    scales: Scales
    slopes: Array
    root: Array
    weights: Array

    @classmethod
    def before(cls, prior: Prior) -> Posterior:
        """Return the model before any measurement."""
        width, traits = len(step_time.COLUMNS), len(prior.effects)
        work, sizes = np.zeros((0, width)), np.zeros(0)
        none = Points(work, sizes, sizes, sizes, np.zeros((0, traits)))
        return fit(prior, none, np.zeros(0), np.zeros(0))

    @property
    def run_sd(self) -> float:
        """Run-to-run standard deviation, as a fraction."""
        return RUN_SD * self.scales.noise

    @property
    def noise(self) -> float:
        """Standard deviation of a measurement, as a fraction."""
        error = self.measured.error
        return math.hypot(self.run_sd, float(np.median(error)) if len(error) else 0.0)

    def predict(self, points: Points, reference: Points | None = None) -> tuple[Array, Array]:
        """Predict the natural logarithm of the seconds.

        Args:
            reference: one more configuration; the uncertainty is that of the difference to it.

        Returns:
            Mean and standard deviation, both (n,).
        """
        if reference is None:
            mean, variance, _, _ = self._project(points)
            return mean, np.sqrt(np.maximum(variance, 1e-12))
        prior, priors = self.measured.prior, self.measured.prior.variance
        mean, variance, slopes, known = self._project(Points.join([points, reference]))
        shared = slopes[:-1] @ (priors * slopes[-1]) - known[:, :-1].T @ known[:, -1]
        shared += prior.covariance(prior.compare(points, reference), self.scales)[:, 0]
        variance = variance[:-1] + variance[-1] - 2 * shared
        return mean[:-1], np.sqrt(np.maximum(variance, 1e-12))

    def _project(self, points: Points) -> tuple[Array, Array, Array, Array]:
        """Return mean, variance, slopes, and the part explained by measurements, (n, m)."""
        prior, priors = self.measured.prior, self.measured.prior.variance
        mean, slopes = prior.physical(self.theta, points)
        differences = prior.compare(self.measured.points, points)
        residuals = prior.covariance(differences, self.scales)
        known = self.root @ (residuals + (self.slopes * priors) @ slopes.T)
        variance = slopes**2 @ priors + prior.variances(points, self.scales)
        variance -= (known**2).sum(axis=0)
        return mean + residuals.T @ self.weights, variance, slopes, known

    def beside(self, points: Points) -> Posterior:
        """Return the posterior as if configurations had been measured as predicted."""
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
        points: n measured configurations; some may be equal.
        log_s: natural logarithms of their seconds, up to a constant, (n,).
        error: standard errors of `log_s` by their own intervals, (n,).
    """
    measured = Measurements(prior, points, log_s, error)
    if len(points) > _MOST:
        by_speed = np.argsort(log_s - np.log(points.micro_batch * points.gas), kind="stable")
        earlier = by_speed[by_speed < len(points) - _MOST // 2]
        latest = np.arange(len(points) - _MOST // 2, len(points))
        measured = measured.only(np.append(np.sort(earlier[: _MOST // 2]), latest))
    theta, scales = prior.mean, Scales()
    if len(measured):
        theta[0] += float(np.median(measured.log_s - prior.physical(theta, measured.points)[0]))
    theta = _find_factors(measured, theta, scales)
    if len(measured) > 1:
        scales = _find_scales(measured, theta, scales)
        theta = _find_factors(measured, theta, scales)
    return _condition(measured, theta, scales)


def _find_scales(measured: Measurements, theta: Array, scales: Scales) -> Scales:
    """Return the likeliest scales for given factors, by doubling and halving one at a time."""
    prior = measured.prior
    slopes, apart = _linearize(measured, theta)
    shared = (slopes * prior.variance) @ slopes.T

    def likelihood(scales: Scales) -> float:
        root = np.linalg.cholesky(measured.covariance(scales) + shared)
        whitened = np.linalg.solve(root, apart)
        return scales.log_prior - float(np.log(np.diag(root)).sum() + whitened @ whitened / 2)

    likeliest = likelihood(scales)
    for name in ("noise", "residual", "switch", "noise", "residual"):
        if name == "switch" and not prior.is_switch.any():
            continue
        for times in (2.0, 0.5):
            while True:
                other = replace(scales, **{name: times * getattr(scales, name)})
                found = likelihood(other)
                if found <= likeliest:
                    break
                scales, likeliest = other, found
    return scales


def _find_factors(measured: Measurements, theta: Array, scales: Scales) -> Array:
    """Return the likeliest factors for given scales, by Gauss-Newton with steps that improve."""
    prior, points, log_s = measured.prior, measured.points, measured.log_s
    root = np.linalg.inv(np.linalg.cholesky(measured.covariance(scales)))

    def evaluate(theta: Array) -> tuple[float, Array, Array]:
        """Return the sum to be minimized, and what a step needs."""
        predicted, slopes = prior.physical(theta, points)
        apart, from_prior = root @ (log_s - predicted), (theta - prior.mean) / prior.variance
        towards = root @ slopes
        total = float(apart @ apart + (theta - prior.mean) @ from_prior)
        return total, towards.T @ towards, towards.T @ apart - from_prior

    least, curvature, gradient = evaluate(theta)
    step = np.linalg.solve(curvature + np.diag(1 / prior.variance), gradient)
    for _ in range(_STEPS):
        found, curvature, gradient = evaluate(theta + step)
        if found < least:
            theta, least = theta + step, found
            step = np.linalg.solve(curvature + np.diag(1 / prior.variance), gradient)
        else:
            step = step / 2
        if np.abs(step).max() < _SETTLED:
            break
    return theta


def _linearize(measured: Measurements, theta: Array) -> tuple[Array, Array]:
    """Return the slopes of the factors, and the prior's errors along them."""
    predicted, slopes = measured.prior.physical(theta, measured.points)
    return slopes, measured.log_s - predicted + slopes @ (theta - measured.prior.mean)


def _condition(measured: Measurements, theta: Array, scales: Scales) -> Posterior:
    slopes, apart = _linearize(measured, theta)
    covariance = measured.covariance(scales) + (slopes * measured.prior.variance) @ slopes.T
    root = np.linalg.inv(np.linalg.cholesky(covariance))
    return Posterior(measured, theta, scales, slopes, root, root.T @ (root @ apart))
