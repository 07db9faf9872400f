"""Predicted seconds of an optimizer step, from the physical model and the trials so far.

    log t = log(physical model) + strategy + growth * octave + rest(octave)
            + knobs * (what is not computation)

The physical model (`dsat.search.step_time`) has a factor on each of its terms. What it does not
know is learned by small corrections: of each strategy, of its growth with the micro batch, a
piecewise linear function of the micro batch, and an effect of each value of a knob on what is not
computation; of a switch of the script, on the whole step. All have normal priors. The fit is the
most likely parameters (Gauss-Newton), their uncertainty its Laplace approximation. Learned along
are how much measurements vary beyond their own intervals, and how much knobs do at all (MacKay,
Neural Computation 4 (1992)).

numpy only: the container of Determined's search runner has no SciPy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from dsat.search import step_time
from dsat.search.normal import Array
from dsat.search.step_time import COMPUTE, TERMS, Job
from dsat.values.zero_strategy import Strategy

_STRATEGY_SD, _GROWTH_SD = 0.03, 0.01
_OCTAVES, _REST_SD = 21, 0.02
_ANYWHERE = 0.05  # of a knob's effect, that is not diluted where computation is all
_KNOB_MEAN = 0.015  # defaults were chosen well: another value of a knob rather costs time
_KNOB_SD = 0.05  # of the effect of a knob's value on what is not computation
_SWITCH_SD = 0.2  # of the effect of a switch of the script on the whole step
_RUN_SD = 0.01  # of measurements from run to run
_PRIOR_WEIGHT, _KNOB_WEIGHT = 6.0, 2.0  # as so many measurements, and values of knobs
_OUTLIER = 3.0  # standard deviations beyond which an error counts linearly (Huber)
_MANY = 8  # measurements that can tell which of them is the odd one out
_ITERATIONS, _SETTLED, _CONVERGED = 30, 0.3, 0.01
_PARTS = tuple(0.5**n for n in range(11))  # of a step, until one brings the fit nearer
_EVERY = 50  # measurements up to which each is fitted; then when they are so much more


@dataclass(frozen=True)
class Points:
    """Configurations, as arrays of one length n.

    Attributes:
        strategy: positions in the strategies.
        work: of `step_time.work`, (n, columns).
        knobs: which value of each knob, relative to the first settings, (n, values).
        micro_batch, gas: samples of a micro step and micro steps of a step.
        room: what is predicted to be left of the memory, as a fraction.
    """

    strategy: Array
    work: Array
    knobs: Array
    micro_batch: Array
    gas: Array
    room: Array

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
class Layout:
    """Meaning of the parameter vector: terms, strategies, growths, rest, values of knobs.

    Attributes:
        job: what is trained on what.
        strategies: the positions in them are `Points.strategy`.
        num_values: number of columns of `Points.knobs`.
        priors: mean and standard deviation of the logarithm of each of the learned terms.
        of_whole: which of these columns act on the whole step; none if empty.
    """

    job: Job
    strategies: Sequence[Strategy]
    num_values: int
    priors: Mapping[str, tuple[float, float]] = field(default_factory=lambda: TERMS)
    of_whole: Sequence[bool] = ()

    @cached_property
    def whole(self) -> Array:
        """1 for each column of knobs that acts on the whole step, (num_values,)."""
        return np.array(self.of_whole or [False] * self.num_values, float)

    def prior(self, knob_scale: float = 1.0, switch_scale: float = 1.0) -> tuple[Array, Array]:
        """Return mean and standard deviation of all parameters.

        Args:
            knob_scale, switch_scale: as of `Fit`.
        """
        terms = np.array([self.priors[name] for name in TERMS])
        count = len(self.strategies)
        others = np.repeat(
            (_STRATEGY_SD, _GROWTH_SD, _REST_SD, _KNOB_SD * knob_scale),
            (count, count, _OCTAVES, self.num_values),
        )
        first = len(others) - self.num_values
        others[first:] = np.where(self.whole > 0, _SWITCH_SD * switch_scale, others[first:])
        means = np.zeros(len(others))
        means[first:] = _KNOB_MEAN
        return np.append(terms[:, 0], means), np.append(terms[:, 1], others)


def log_seconds(layout: Layout, points: Points, theta: Array) -> tuple[Array, Array]:
    """Predict the logarithm of the seconds, (n,), and its gradient, (n, parameters)."""
    count, rows, whole = len(layout.strategies), np.arange(len(points)), layout.whole
    octave = np.log2(points.micro_batch)
    corrections = np.zeros((len(points), 2 * count + _OCTAVES))
    corrections[rows, points.strategy] = 1.0
    corrections[rows, count + points.strategy] = octave
    corrections[:, 2 * count :] = np.clip(octave[:, None] - np.arange(_OCTAVES), 0.0, 1.0)
    physical = theta[: len(TERMS)]
    total, kernels = step_time.seconds(
        layout.job.hardware, physical, points.work, points.micro_batch, points.gas, points.room
    )
    computing = kernels.s / total.s
    slopes = total.slopes() / total.s[:, None]
    effects = theta[len(theta) - len(whole) :]
    ordinary = points.knobs @ (effects * (1 - whole))
    less = kernels.slopes() / total.s[:, None] - computing[:, None] * slopes
    share = np.where(whole > 0, 1.0, 1 - computing[:, None] + _ANYWHERE)
    learned = corrections @ theta[len(TERMS) : len(theta) - len(whole)]
    learned = learned + (share * points.knobs) @ effects
    terms = slopes - less * ordinary[:, None]
    return np.log(total.s) + learned, np.hstack((terms, corrections, share * points.knobs))


@dataclass(frozen=True)
class Fit:
    """Parameters and their uncertainty after some measurements.

    Attributes:
        covariance: of `theta`.
        run_sd: standard deviation of measured times beyond their own intervals, as a fraction.
        own_sd: that of their own intervals, in the middle.
        knob_scale, switch_scale: how much larger the effects of knobs, and of the script's
            switches, are than was believed.
    """

    layout: Layout
    theta: Array
    covariance: Array
    run_sd: float = _RUN_SD
    own_sd: float = 0.0
    knob_scale: float = 1.0
    switch_scale: float = 1.0

    @classmethod
    def prior(cls, layout: Layout) -> Fit:
        """Return the fit without any measurement."""
        mean, sd = layout.prior()
        return cls(layout, mean, np.diag(sd**2))

    @property
    def misfit(self) -> float:
        """Standard deviation of measurements from the model beyond run-to-run variation."""
        return math.sqrt(max(0.0, self.run_sd**2 - _RUN_SD**2))

    @property
    def noise(self) -> float:
        """Standard deviation of a measurement, as a fraction."""
        return math.hypot(min(self.run_sd, _RUN_SD), self.own_sd)

    def log_s(self, points: Points) -> Array:
        """Predict the natural logarithm of the seconds of n configurations, (n,)."""
        return log_seconds(self.layout, points, self.theta)[0]

    def predict(self, points: Points, reference: Points | None = None) -> tuple[Array, Array]:
        """Predict the natural logarithm of the seconds.

        Args:
            points: n configurations.
            reference: one more; the uncertainty is of the difference to it, towards shorter times.

        Returns:
            Mean and standard deviation, both (n,).
        """
        both = points if reference is None else Points.of([points, reference])
        mean, gradient = log_seconds(self.layout, both, self.theta)
        if reference is not None:
            mean, gradient = mean[:-1], gradient[:-1] - gradient[-1]
            gradient[:, : len(TERMS)] *= self._downwards(gradient[:, : len(TERMS)])
        variance = ((gradient @ self.covariance) * gradient).sum(axis=1)
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    def _downwards(self, gradient: Array) -> Array:
        """Return what is left of the effect of a term where it makes a step shorter.

        A term that is unknown may be many times as long, but no shorter than nothing.
        """
        sd = np.sqrt(np.diag(self.covariance)[: len(TERMS)])
        left: Array = np.where(gradient > 0, -np.expm1(-sd) / np.maximum(sd, 1e-9), 1.0)
        return left

    def beside(self, points: Points) -> Fit:
        """Return the fit as if all n configurations took as long as predicted."""
        gradient = log_seconds(self.layout, points, self.theta)[1]
        towards = gradient @ self.covariance
        expected = towards @ gradient.T
        expected[np.diag_indices(len(points))] += self.run_sd**2 + self.own_sd**2
        known = self.covariance - towards.T @ np.linalg.solve(expected, towards)
        return replace(self, covariance=known)

    def updated(self, points: Points, log_s: Array, standard_error: Array) -> Fit:
        """Return the fit to measurements, begun from this one.

        Args:
            points: all n configurations that were measured.
            log_s: natural logarithms of their seconds, up to a constant, (n,).
            standard_error: of `log_s`, (n,).
        """
        layout, theta, run_sd = self.layout, self.theta, self.run_sd
        scales = (self.knob_scale, self.switch_scale)
        predict, mean = partial(log_seconds, layout, points), layout.prior(*scales)[0]
        if theta[COMPUTE] == 0.0:  # the first: what hardware it is
            theta = theta.copy()
            theta[COMPUTE] = float(np.median(log_s - predict(theta)[0]))
        mean[COMPUTE] = theta[COMPUTE]
        outlier = _OUTLIER if len(points) >= _MANY else math.inf

        def misfit(at: Array, error: Array) -> float:
            z = error / noise
            counted = _huber(z, outlier)
            squares = counted * (2 - counted) * z**2
            return float(squares.sum() + ((at - mean) ** 2 / variance).sum())

        following = predict(theta)
        for _ in range(_ITERATIONS):
            variance = layout.prior(*scales)[1] ** 2
            noise = np.sqrt(run_sd**2 + standard_error**2)
            predicted, gradient = following
            error = log_s - predicted
            weight = _huber(error / noise, outlier) / noise**2
            covariance = _posterior(gradient, weight, variance)
            step = covariance @ (gradient.T @ (weight * error) - (theta - mean) / variance)
            step *= min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-12))
            now = misfit(theta, error)
            for part in _PARTS:
                at = theta + part * step
                following = predict(at)
                if misfit(at, log_s - following[0]) <= now:
                    break
            theta = at
            largest = float(np.abs(step).max())
            if largest > _SETTLED:  # the errors are not noise yet
                continue
            uncertain = ((gradient @ covariance) * gradient).sum(axis=1)
            beyond = weight * noise**2 * error**2 + uncertain - standard_error**2
            # Single terms may be negative: clipped one by one, they would add up to noise.
            total = _PRIOR_WEIGHT * _RUN_SD**2 + float(beyond.sum())
            least, before = (_RUN_SD / 2) ** 2, run_sd
            run_sd = math.sqrt(max(total / (_PRIOR_WEIGHT + len(error)), least))
            scales = (
                _scale(theta, covariance, layout.whole == 0, _KNOB_SD, scales[0]),
                _scale(theta, covariance, layout.whole > 0, _SWITCH_SD, scales[1]),
            )
            if largest < _CONVERGED and abs(run_sd - before) < _CONVERGED * before:
                break
        own_sd = float(np.median(standard_error))
        return Fit(layout, theta, covariance, run_sd, own_sd, *scales)


def _huber(z: Array, outlier: float) -> Array:
    weight: Array = np.minimum(1.0, outlier / np.maximum(np.abs(z), 1e-12))
    return weight


def _posterior(gradient: Array, weight: Array, variance: Array) -> Array:
    """(diag(1 / variance) + gradient.T @ diag(weight) @ gradient)^-1, by the smaller inverse."""
    n, count = gradient.shape
    if n >= count:
        precision = (gradient.T * weight) @ gradient
        precision[np.diag_indices(count)] += 1 / variance
        return np.linalg.inv(precision)
    scaled = gradient * variance
    between = scaled @ gradient.T
    between[np.diag_indices(n)] += 1 / weight
    covariance: Array = -scaled.T @ np.linalg.solve(between, scaled)
    covariance[np.diag_indices(count)] += variance
    return covariance


def _scale(theta: Array, covariance: Array, among: Array, sd: float, scale: float) -> float:
    """Estimate the scale of some effects, from those that measurements determine.

    Args:
        among: which columns of knobs count, (number of columns,).
        sd: standard deviation of their effects before any measurement.
        scale: the one before.
    """
    if not among.any():
        return scale
    first = len(theta) - len(among)
    effects, variance = theta[first:][among], np.diag(covariance)[first:][among]
    determined = np.clip(1 - variance / (sd * scale) ** 2, 0.0, 1.0).sum()
    total = _KNOB_WEIGHT + float(((effects / sd) ** 2).sum())
    return math.sqrt(total / (_KNOB_WEIGHT + float(determined)))


class SpeedModel:
    """Seconds of configurations that are made known one by one, and predictions of others.

    Attributes:
        fit: to what was measured, as of late.
        measured: the configurations that were measured, in order; none before the first.
        log_s: logarithms of their seconds.
    """

    def __init__(self, layout: Layout) -> None:
        self.fit = Fit.prior(layout)
        self.measured: Points | None = None
        self.log_s: list[float] = []
        self._errors: list[float] = []
        self._fitted = 0

    def update(self, points: Points, log_s: float, standard_error: float) -> None:
        """Take in one configuration that was measured.

        Each is fitted at once, and many in groups, so that it does not matter when predictions are
        asked for: a fit begins with the one before.
        """
        before = [] if self.measured is None else [self.measured]
        self.measured = Points.of([*before, points])
        self.log_s.append(log_s)
        self._errors.append(standard_error)
        if len(self.measured) >= self._fitted + max(1, self._fitted // _EVERY):
            self._fitted = len(self.measured)
            self.fit = self.fit.updated(self.measured, np.array(self.log_s), np.array(self._errors))
