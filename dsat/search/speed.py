"""Predicted seconds of an optimizer step, from the physical model and the trials so far.

    log t = log(physical model) + residual + noise

The physical model (`dsat.search.step_time`) has a handful of learned factors. The residual is one
Gaussian process over strategy, micro batch and settings: the more two configurations differ, the
more their residuals may differ. Measurements of one configuration differ by the error within a run
and by run-to-run variation. The scales of residuals and noise are the most probable ones, given the
measurements, so noise is not mistaken for a gain.

Every fit is a new Gauss-Newton fit to all measurements that `dsat.search.predictions` keeps.

numpy only: the container of Determined's search runner has no SciPy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from dsat.search import step_time
from dsat.search.normal import Array
from dsat.search.step_time import FACTORS, Hardware, Terms

# Standard deviation of the change of the residual if the micro batch doubles. Without it, the worst
# replay ends at 96.5 % instead of 97.2 % (see `choice` for replays).
_OCTAVE_SD = 0.03
RUN_SD = 0.01  # standard deviation from run to run, before its scale is learned
# Prior standard deviation of the logarithm of each scale: a factor of three. With a factor of two,
# replays take 290 trials instead of 256, and end 0.1 points lower.
_SCALE_SD = 1.2
# Gauss-Newton ends after `_STEPS` iterations, or if the log factors change by less than `_SETTLED`,
# or twice the log posterior by less than `_LEAST_GAIN`. It can oscillate where one part of an
# optimizer step hides another.
_STEPS, _SETTLED, _LEAST_GAIN = 20, 0.01, 0.1


@dataclass(frozen=True)
class Points:
    """Configurations, as arrays of equal length n.

    Attributes:
        work: counts of a step, (n, columns); see `step_time.work`.
        micro_batch, gas: samples per micro step, and micro steps per optimizer step.
        room: predicted free memory as a fraction of the device's; negative if it does not fit.
        traits: 1 for each value of strategy and settings that a configuration has, (n, values).
    """

    work: Array
    micro_batch: Array
    gas: Array
    room: Array
    traits: Array

    def __len__(self) -> int:
        return len(self.micro_batch)

    def only(self, chosen: Array) -> Points:
        return Points(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

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
    """Learned factors of the prior's standard deviations."""

    residual: float = 1.0
    noise: float = 1.0


@dataclass(frozen=True)
class Prior:
    """The model before any measurement.

    Attributes:
        effects: standard deviation of each trait's effect on the log seconds, (values,).
        factors: mean and standard deviation of the logarithms of the learned factors.
        level_sd: standard deviation of any residual, which limits how much two residuals differ. A
            tenfold value changes `benchmarks/replay.py` by less than 0.1 percentage points.
        growth_sd: standard deviation of the residual's slope per doubling of the micro batch.
            Without it, the results of `benchmarks/replay.py` are 0.1 percentage points lower.
    """

    hardware: Hardware
    effects: Array
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

        If two configurations differ little, each differing trait has an independent effect.
        """
        # If a setting differs, the traits of both its values differ, so each counts half.
        weights = (scales.residual * self.effects) ** 2 / 2
        octaves, others = np.log2(one.micro_batch)[:, None], np.log2(other.micro_batch)
        distance = (one.traits @ weights)[:, None] + other.traits @ weights
        distance -= 2 * (one.traits * weights) @ other.traits.T
        distance += (scales.residual * _OCTAVE_SD) ** 2 * np.abs(octaves - others)
        variance = self.level_sd**2
        covariance: Array = variance * np.exp(distance / (-2 * variance))
        covariance += (scales.residual * self.growth_sd) ** 2 * (octaves * others)
        return covariance

    def variances(self, points: Points, scales: Scales) -> Array:
        """Return the prior variances of residuals, (n,)."""
        growth = scales.residual * self.growth_sd * np.log2(points.micro_batch)
        variances: Array = self.level_sd**2 + growth**2
        return variances

    def terms(self, points: Points) -> Terms:
        return Terms(self.hardware, points.work, points.micro_batch, points.gas, points.room)


def linearize(terms: Terms, theta: Array) -> tuple[Array, Array]:
    """Return log seconds, (n,), and derivatives with respect to the log factors, (n, factors)."""
    step = 1e-4
    thetas = np.column_stack((theta, theta[:, None] + step * np.eye(len(theta))))
    log_s = np.log(terms.seconds(thetas[:, :, None]))
    return log_s[0], (log_s[1:] - log_s[0]).T / step


@dataclass(frozen=True)
class Measurements:
    """Measurements of configurations, some of which may be equal.

    Attributes:
        log_s: natural logarithms of the seconds of a step, up to a common constant, (n,).
        error: standard errors of `log_s` within each run, (n,).
    """

    prior: Prior
    points: Points
    log_s: Array
    error: Array

    def covariance(self, scales: Scales) -> Array:
        """Return the covariance of residuals and noise, (n, n)."""
        covariance = self.prior.covariance(self.points, self.points, scales)
        noise = (RUN_SD * scales.noise) ** 2 + self.error**2
        return covariance + np.diag(noise)

    def linearize(self, theta: Array) -> tuple[Array, Array]:
        """Return measured minus predicted log seconds, (n,), and the slopes of `linearize`."""
        predicted, slopes = linearize(self._terms, theta)
        return self.log_s - predicted, slopes

    @cached_property
    def _terms(self) -> Terms:
        return self.prior.terms(self.points)


@dataclass(frozen=True)
class Posterior:
    """Distribution of the log seconds of any configuration after n measurements.

    It is a Gaussian process, with the physical model linearized in its factors (Rasmussen
    and Williams, Gaussian Processes for Machine Learning (2006), section 2.7).

    Attributes:
        theta: likeliest logarithms of the factors, at which the physical model is linearized.
        slopes: derivatives of measured log seconds with respect to `theta`, (n, factors).
        root: inverse of the Cholesky factor of the measurements' covariance, (n, n).
        whitened: `root` times the errors of the prior's predictions, (n,).
    """

    measured: Measurements
    theta: Array
    scales: Scales
    slopes: Array
    root: Array
    whitened: Array

    @classmethod
    def before(cls, prior: Prior) -> Posterior:
        """Return the model before any measurement."""
        width, traits = len(step_time.COLUMNS), len(prior.effects)
        work, sizes = np.zeros((0, width)), np.zeros(0)
        none = Points(work, sizes, sizes, sizes, np.zeros((0, traits)))
        return fit(prior, none, np.zeros(0), np.zeros(0))

    @property
    def noise(self) -> float:
        """Standard deviation of a typical measurement, as a fraction."""
        error = self.measured.error
        usual_error = float(np.median(error)) if len(error) else 0.0
        return math.hypot(RUN_SD * self.scales.noise, usual_error)

    def predict(self, points: Points, reference: int | None = None) -> tuple[Array, Array]:
        """Predict the natural logarithm of the seconds of a step.

        Args:
            reference: position of one point, or None.

        Returns:
            Means, (n,), and standard deviations, (n,); with a reference, the deviations are those
            of the differences from that point.
        """
        prior, priors = self.measured.prior, self.measured.prior.variance
        predicted, slopes = linearize(prior.terms(points), self.theta)
        shared = prior.covariance(self.measured.points, points, self.scales)
        explained = self.root @ (shared + (self.slopes * priors) @ slopes.T)
        mean = predicted + slopes @ (prior.mean - self.theta) + explained.T @ self.whitened
        variance = slopes**2 @ priors + prior.variances(points, self.scales)
        variance -= (explained**2).sum(axis=0)
        if reference is not None:
            other = points.only(np.array([reference]))
            shared = prior.covariance(points, other, self.scales)[:, 0]
            shared += (slopes * slopes[reference]) @ priors
            shared -= (explained * explained[:, [reference]]).sum(axis=0)
            variance = variance + variance[reference] - 2 * shared
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    def beside(self, points: Points) -> Posterior:
        """Return the posterior as if these points had also been measured, exactly as predicted."""
        measured = self.measured
        extended = Measurements(
            measured.prior,
            Points.join([measured.points, points]),
            np.append(measured.log_s, self.predict(points)[0]),
            np.append(measured.error, np.full(len(points), self.noise)),
        )
        return _condition(extended, self.theta, self.scales)


def fit(prior: Prior, points: Points, log_s: Array, error: Array) -> Posterior:
    """Fit the model to measurements; for the arguments see `Measurements`."""
    measured = Measurements(prior, points, log_s, error)
    theta, scales = prior.mean, Scales()
    if len(points):
        theta[0] += float(np.median(measured.linearize(theta)[0]))
    theta = _find_factors(measured, theta, scales)
    if len(points) > 1:
        scales = _find_scales(measured, theta)
        theta = _find_factors(measured, theta, scales)
    return _condition(measured, theta, scales)


def _find_scales(measured: Measurements, theta: Array) -> Scales:
    """Return the likeliest scales for these factors, by doubling or halving one at a time."""
    scales = Scales()

    @functools.cache
    def likelihood(scales: Scales) -> float:
        model, logs = _condition(measured, theta, scales), np.log([scales.residual, scales.noise])
        squares = model.whitened @ model.whitened + logs @ logs / _SCALE_SD**2
        return float(np.log(np.diag(model.root)).sum() - squares / 2)

    for name in ("noise", "residual", "noise", "residual"):
        for times in (2.0, 0.5):
            while True:
                other = replace(scales, **{name: times * getattr(scales, name)})
                if likelihood(other) <= likelihood(scales):
                    break
                scales = other
    return scales


def _find_factors(measured: Measurements, theta: Array, scales: Scales) -> Array:
    """Return the likeliest log factors for these scales, by damped Gauss-Newton."""
    prior = measured.prior
    root = np.linalg.inv(np.linalg.cholesky(measured.covariance(scales)))

    def evaluate(theta: Array) -> tuple[float, Array]:
        """Return -2 log posterior (plus a constant), and the next Gauss-Newton step."""
        residuals, slopes = (root @ array for array in measured.linearize(theta))
        pull = (theta - prior.mean) / prior.variance
        total = float(residuals @ residuals + (theta - prior.mean) @ pull)
        curvature = slopes.T @ slopes + np.diag(1 / prior.variance)
        return total, np.linalg.solve(curvature, slopes.T @ residuals - pull)

    least_loss, step = evaluate(theta)
    for _ in range(_STEPS):
        loss, further = evaluate(theta + step)
        gained = least_loss - loss
        if gained > 0:
            least_loss, theta, step = loss, theta + step, further
        else:
            step = step / 2
        if 0 < gained < _LEAST_GAIN or np.abs(step).max() < _SETTLED:
            break
    return theta


def _condition(measured: Measurements, theta: Array, scales: Scales) -> Posterior:
    prior = measured.prior
    apart, slopes = measured.linearize(theta)
    covariance = measured.covariance(scales) + (slopes * prior.variance) @ slopes.T
    root = np.linalg.inv(np.linalg.cholesky(covariance))
    whitened = root @ (apart + slopes @ (theta - prior.mean))
    return Posterior(measured, theta, scales, slopes, root, whitened)
