"""The time of an optimizer step, predicted for any configuration from those that were measured.

    t = (gas * (max(L, a + b * micro batch) + c_s) + o_s) * exp(knobs * dilution + rest)

L is the launch floor; a and b are what a micro step costs by itself and per sample; c_s is what
strategy s adds to every micro step (reductions and gathers, hooks, copies to the host), o_s what it
needs at the end of a step (optimizer, reductions and gathers at the boundary). L, a and b belong to
the model and are shared by all strategies; c_s and o_s are drawn to a common cost per unit of
traffic. Each of these terms is the exponential of a parameter, so that none can be negative. Knobs
change the time by a few percent, most of them what does not grow with the micro batch (reductions
and gathers, the optimizer's step), which is diluted where samples outweigh it; the rest is a smooth
function of the micro batch, for what the formula does not know.

All parameters have normal priors; the fit is regularised least squares on the logarithm of the
time (Gauss-Newton), the uncertainty its Laplace approximation. How much measurements vary from run
to run and how much knobs do at all is learned along (MacKay, Neural Computation 4 (1992)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dsat.search.normal import Array
from dsat.values.zero_strategy import NONE, NVME, Strategy

# Parameters shared by all strategies; all but the first relative to it.
_SCALE, _FIXED, _FLOOR, _MICRO_UNIT, _BOUNDARY_UNIT = range(5)
_SHARED_MEAN = (0.0, math.log(0.1), math.log(0.1), math.log(0.02), math.log(0.02))
_SHARED_SD = (5.0, 2.0, 2.0, 1.2, 1.2)
# Then for each strategy: both terms' deviation from the common cost of a unit, the deviation of the
# whole, and of its growth with each octave of the micro batch, up to so many above the reference:
# where samples outweigh all else, strategies are alike.
_STRATEGY_SD = (0.8, 0.8, 0.02, 0.01)
_GROWING_OCTAVES = 1.0
_PER_STRATEGY = len(_STRATEGY_SD)
# Then the rest: piecewise linear between powers of two.
_OCTAVES = 21
_REST_SD = 0.02
_SHARPNESS = 6.0  # of the maximum: the p of a p-norm

# How many times as long a round takes between hosts as inside of one, by what links give each
# accelerator: NVLink 300 and 450 GB/s a way, InfiniBand 25 and 50 (NVIDIA's DGX A100 and H100).
_BETWEEN_HOSTS = 10.0

_RUN_SD = 0.02  # of measurements from run to run
_PRIOR_WEIGHT = 6.0  # as so many measurements, or values of knobs
_GROUP_WEIGHT = 2.0  # of what is learned of all knobs for each
_MANY = 8
_OUTLIER = 3.0  # standard deviations beyond which an error counts linearly (Huber)
_ITERATIONS = 40
_SMALLEST_PART = 1e-3  # of a step
_SETTLED, _CONVERGED = (
    0.2,
    0.01,
)  # steps below which errors are noise, and below which they are left


@dataclass(frozen=True)
class Points:
    """Configurations, as arrays of one length n.

    Attributes:
        strategy: positions in the layout's strategies.
        micro_batch, gas: samples of a micro step and micro steps of a step.
        knobs: features of the other settings, (n, number of features); zero for the defaults.
    """

    strategy: Array
    micro_batch: Array
    gas: Array
    knobs: Array

    def __len__(self) -> int:
        return len(self.micro_batch)

    def only(self, kept: Array) -> Points:
        """Those at some positions."""
        return Points(self.strategy[kept], self.micro_batch[kept], self.gas[kept], self.knobs[kept])

    @classmethod
    def of(cls, parts: Sequence[Points]) -> Points:
        """All of several, one after the other."""
        return cls(
            np.concatenate([part.strategy for part in parts]),
            np.concatenate([part.micro_batch for part in parts]),
            np.concatenate([part.gas for part in parts]),
            np.concatenate([part.knobs for part in parts]),
        )


@dataclass(frozen=True)
class KnobPrior:
    """Prior of the effects of knobs.

    Attributes:
        mean, sd: of the logarithm of the factor on time, by feature.
        group: features whose measured effects correct `sd` together, from 0 on; -1 for none.
        diluted: whether it changes only what does not grow with the micro batch, by feature.
    """

    mean: Array
    sd: Array
    group: Array
    diluted: Array


@dataclass(frozen=True)
class Layout:
    """Layout of the parameter vector.

    Attributes:
        slots: data-parallel slots.
        reference_micro_batch: one at which the samples are likely to outweigh all else; beyond it
            what does not grow with them is diluted.
        over_hosts: whether the slots are on several hosts.
    """

    strategies: Sequence[Strategy]
    slots: int
    reference_micro_batch: float
    knobs: KnobPrior
    over_hosts: bool = False

    @property
    def first_knob(self) -> int:
        return len(_SHARED_MEAN) + _PER_STRATEGY * len(self.strategies) + _OCTAVES

    def prior_mean(self) -> Array:
        return np.concatenate(
            (_SHARED_MEAN, np.zeros(self.first_knob - len(_SHARED_MEAN)), self.knobs.mean)
        )

    def prior_sd(self, knob_scales: Array) -> Array:
        factor = np.append(knob_scales, 1.0)[self.knobs.group]
        return np.concatenate(
            (
                _SHARED_SD,
                np.tile(_STRATEGY_SD, len(self.strategies)),
                np.full(_OCTAVES, _REST_SD),
                self.knobs.sd * factor,
            )
        )

    def base(
        self, theta: Array, strategy: Array, micro_batch: Array, gas: Array
    ) -> tuple[Array, Array]:
        """The logarithm of the time with default knobs, (n,), and its gradient, (n, first_knob)."""
        by_strategy = [traffic(s, self.slots, over_hosts=self.over_hosts) for s in self.strategies]
        units = np.array(by_strategy)[strategy]
        own = len(_SHARED_MEAN) + _PER_STRATEGY * strategy.astype(int)
        rows = np.arange(len(micro_batch))
        samples = micro_batch / self.reference_micro_batch
        fixed, floor = np.exp(theta[_FIXED]), np.exp(theta[_FLOOR])
        work = fixed + samples
        ratio = floor / work
        # max(floor, work), smooth; both exponentials stay below 1.
        larger = np.maximum(floor, work)
        small = np.minimum(ratio, 1 / ratio) ** _SHARPNESS
        micro_step = larger * (1 + small) ** (1 / _SHARPNESS)
        floor_share = np.where(ratio > 1, 1 / (1 + small), small / (1 + small))
        by_micro_step = gas * units[:, 0] * np.exp(theta[_MICRO_UNIT] + theta[own])
        at_boundary = units[:, 1] * np.exp(theta[_BOUNDARY_UNIT] + theta[own + 1])
        total = gas * micro_step + by_micro_step + at_boundary

        gradient = np.zeros((len(rows), self.first_knob))
        gradient[:, _SCALE] = 1.0
        gradient[:, _FLOOR] = gas * micro_step * floor_share / total
        gradient[:, _FIXED] = gas * micro_step * (1 - floor_share) * (fixed / work) / total
        gradient[rows, own] = gradient[:, _MICRO_UNIT] = by_micro_step / total
        gradient[rows, own + 1] = gradient[:, _BOUNDARY_UNIT] = at_boundary / total
        gradient[rows, own + 2] = 1.0
        octave = np.log2(micro_batch)
        beyond = octave - math.log2(self.reference_micro_batch)
        gradient[rows, own + 3] = np.minimum(beyond, _GROWING_OCTAVES)
        rest = self.first_knob - _OCTAVES
        left = np.clip(octave.astype(int), 0, _OCTAVES - 2)
        share = np.clip(octave - left, 0.0, 1.0)
        gradient[rows, rest + left] = 1 - share
        gradient[rows, rest + left + 1] = share
        linear = own[:, None] + np.array((2, 3))
        value = theta[_SCALE] + np.log(total)
        value += (gradient[rows[:, None], linear] * theta[linear]).sum(axis=1)
        value += gradient[:, rest:] @ theta[rest : self.first_knob]
        return value, gradient

    def predict(self, theta: Array, points: Points) -> tuple[Array, Array]:
        """The logarithm of the time, (n,), and its gradient by all parameters."""
        value, gradient = self.base(theta, points.strategy, points.micro_batch, points.gas)
        share = np.where(self.knobs.diluted, self.dilution(points.micro_batch)[:, None], 1.0)
        knobs = points.knobs * share
        return value + knobs @ theta[self.first_knob :], np.hstack((gradient, knobs))

    def dilution(self, micro_batch: Array) -> Array:
        """Return the remaining share of a diluted effect, by the micro batch."""
        left: Array = np.minimum(1.0, self.reference_micro_batch / micro_batch)
        return left


@dataclass(frozen=True)
class Reference:
    """A configuration that others are compared with, as a fit predicts it.

    Attributes:
        points: itself.
        log_s: the mean of the logarithm of its time.
        gradient: of that, by all parameters, (1, parameters).
    """

    points: Points
    log_s: float
    gradient: Array


@dataclass(frozen=True)
class Fit:
    """Parameters and their uncertainty after some measurements.

    Attributes:
        covariance: of `theta`.
        run_sd: standard deviation of a measured time from run to run, as a fraction.
        own_sd: that of one by its own interval, in the middle.
        knob_scales: how much larger the knobs' effects are than was believed, by group.
    """

    layout: Layout
    theta: Array
    covariance: Array
    run_sd: float
    own_sd: float
    knob_scales: Array

    def predict(self, points: Points) -> tuple[Array, Array]:
        """Mean and standard deviation of the natural logarithm of the time, both (n,)."""
        mean, gradient = self.layout.predict(self.theta, points)
        variance = ((gradient @ self.covariance) * gradient).sum(axis=1)
        return mean, np.sqrt(np.maximum(variance, 0.0))

    def reference(self, points: Points) -> Reference:
        """One configuration, as `grid` takes it."""
        value, gradient = self.layout.predict(self.theta, points)
        return Reference(points, float(value[0]), gradient)

    def grid(
        self,
        strategy: int,
        micro_batch: Array,
        gas: Array,
        knobs: Array,
        reference: Reference | None,
    ) -> tuple[Array, Array]:
        """All combinations of m batches and s settings of a strategy.

        Args:
            strategy: its position.
            micro_batch: (m,).
            gas: (m,).
            knobs: (s, number of features).
            reference: one configuration.

        Returns:
            The mean of the logarithm of the time and the standard deviation of its difference to
            that of `reference` (or of itself, if there is none), both (m, s). It is that towards
            shorter times: an unknown floor can only make a step longer, and is left out.
        """
        layout, first = self.layout, self.layout.first_knob
        at = np.full(len(micro_batch), strategy)
        value, gradient = layout.base(self.theta, at, micro_batch, gas)
        # What diluted features leave is multiplied by `left`, so they are kept apart.
        is_diluted, left = layout.knobs.diluted, layout.dilution(micro_batch)[:, None]
        diluted, others = knobs * is_diluted, knobs * ~is_diluted
        effects = self.theta[first:]
        mean = left * (diluted @ effects) + (others @ effects + value[:, None])
        shared, between = self.covariance[:first, :first], self.covariance[:first, first:]
        if reference is not None:
            gradient = gradient - reference.gradient[:, :first]
        gradient[:, _FLOOR] = 0.0
        crossed = gradient @ between
        alone = ((gradient @ shared) * gradient).sum(axis=1)
        variance = (crossed * np.where(is_diluted, left, 1.0)) @ knobs.T
        if reference is not None:
            others = others - reference.gradient[:, first:]
            alone -= 2 * (crossed @ reference.gradient[0, first:])
        variance *= 2
        variance += alone[:, None]
        of_knobs = self.covariance[first:, first:]
        from_diluted = diluted @ of_knobs
        variance += left**2 * (from_diluted * diluted).sum(axis=1)
        variance += 2 * left * (from_diluted * others).sum(axis=1)
        variance += ((others @ of_knobs) * others).sum(axis=1)
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    def beside(self, points: Points) -> Fit:
        """Return the fit as if all n configurations took as long as predicted."""
        gradient = self.layout.predict(self.theta, points)[1]
        towards = gradient @ self.covariance
        expected = towards @ gradient.T
        expected[np.diag_indices(len(points))] += self.run_sd**2 + self.own_sd**2
        known = self.covariance - towards.T @ np.linalg.solve(expected, towards)
        return replace(self, covariance=known)

    def learnable(self, sd: Array) -> Array:
        """By how much a prediction will move when its configuration is measured.

        A measurement is as uncertain as those before it, so it tells little of what is known better
        than that (the knowledge gradient's standard deviation: Frazier, Powell and Dayanik, SIAM J.
        Control Optim. 47 (2008)).

        Args:
            sd: standard deviations of predictions.

        Returns:
            That of what they will be, of the same shape.
        """
        moved: Array = sd**2 / np.sqrt(sd**2 + self.run_sd**2 + self.own_sd**2)
        return moved

    def learnable_together(self, points: Points, reference: Points) -> Array:
        """Return the covariance of predictions after all n configurations are measured.

        Args:
            points: the n configurations.
            reference: one configuration; it is the differences to it that are predicted.

        Returns:
            The covariance of what they will be, (n, n).
        """
        gradient = self.layout.predict(self.theta, points)[1]
        gradient -= self.layout.predict(self.theta, reference)[1]
        gradient[:, _FLOOR] = 0.0  # as in `grid`
        covariance = gradient @ self.covariance @ gradient.T
        noise = np.eye(len(points)) * (self.run_sd**2 + self.own_sd**2)
        moved = covariance @ np.linalg.solve(covariance + noise, covariance)
        symmetric: Array = (moved + moved.T) / 2
        return symmetric

    def knob_effects(self, knobs: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation of the undiluted effects of rows of features."""
        first = self.layout.first_knob
        covariance = self.covariance[first:, first:]
        variance = ((knobs @ covariance) * knobs).sum(axis=1)
        return knobs @ self.theta[first:], np.sqrt(np.maximum(variance, 0.0))


def fit(
    layout: Layout, points: Points, log_s: Array, ci95: Array, *, start: Fit | None = None
) -> Fit:
    """Fits the model to measured times; without any it is the prior.

    Args:
        layout: what the parameters stand for.
        points: the n configurations that were measured.
        log_s: natural logarithms of the measured seconds of an optimizer step, (n,); up to a
            constant that is the same for all.
        ci95: half-widths of the 95 % confidence intervals of the times, as fractions of them, (n,).
        start: an earlier fit of the same layout to begin from.

    Returns:
        The most likely parameters and their covariance. What it predicts is up to the same constant
        as `log_s`.
    """
    mean = layout.prior_mean()
    if len(points):
        mean[_SCALE] = float(np.median(log_s))
    theta = mean.copy() if start is None else start.theta.copy()
    run_sd = _RUN_SD if start is None else start.run_sd
    scales = np.ones(layout.knobs.group.max(initial=-1) + 1) if start is None else start.knob_scales
    own_variance = (ci95 / 1.96) ** 2
    first = layout.first_knob
    covariance = np.diag(layout.prior_sd(scales) ** 2)
    # A few measurements cannot tell which of them is the odd one out.
    outlier = _OUTLIER if len(points) >= _MANY else math.inf
    for _ in range(_ITERATIONS if len(points) else 0):
        predicted, gradient = layout.predict(theta, points)
        error = log_s - predicted
        noise = np.sqrt(run_sd**2 + own_variance)
        weight = np.minimum(1.0, outlier * noise / np.maximum(np.abs(error), 1e-12)) / noise**2
        variance = layout.prior_sd(scales) ** 2
        covariance = posterior(gradient, weight, variance)
        step = covariance @ (gradient.T @ (weight * error) - (theta - mean) / variance)

        def misfit(at: Array, noise: Array = noise, variance: Array = variance) -> float:
            z = np.abs(log_s - layout.predict(at, points)[0]) / noise
            huber = np.where(z > outlier, outlier * (2 * z - outlier), z**2) if len(z) else z
            return float(huber.sum() + ((at - mean) ** 2 / variance).sum())

        largest = float(np.abs(step[1:first]).max())
        part, now = min(1.0, 2.0 / max(largest, 1e-12)), misfit(theta)
        while part > _SMALLEST_PART and misfit(theta + part * step) > now:
            part /= 2
        theta += part * step
        largest *= part
        if largest > _SETTLED:
            continue
        before = run_sd
        run_sd = _run_sd(error, weight, gradient, covariance, noise, own_variance)
        scales = _knob_scales(layout.knobs, theta[first:], covariance[first:, first:], scales)
        if largest < _CONVERGED and abs(run_sd - before) < _CONVERGED * before:
            break
    own_sd = float(np.median(ci95)) / 1.96 if len(ci95) else 0.0
    return Fit(layout, theta, covariance, run_sd, own_sd, scales)


def posterior(gradient: Array, weight: Array, variance: Array) -> Array:
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


def _run_sd(
    error: Array, weight: Array, gradient: Array, covariance: Array, noise: Array, own: Array
) -> float:
    """Estimate the run-to-run variation beyond the uncertainty of single measurements."""
    uncertain = ((gradient @ covariance) * gradient).sum(axis=1)
    beyond = weight * noise**2 * error**2 + uncertain - own
    total = _PRIOR_WEIGHT * _RUN_SD**2 + float(np.maximum(beyond, 0.0).sum())
    return math.sqrt(total / (_PRIOR_WEIGHT + len(error)))


def _knob_scales(prior: KnobPrior, effects: Array, covariance: Array, scales: Array) -> Array:
    """Estimate the scale of the effects of knobs, from those that measurements determine.

    Those of one knob correct each other most, those of all knobs what is believed of each.
    """
    grouped = prior.group >= 0
    group, sd = prior.group[grouped], prior.sd[grouped]
    off = ((effects - prior.mean)[grouped] / sd) ** 2
    determined = 1 - np.diag(covariance)[grouped] / (scales[group] * sd) ** 2
    count = len(scales)
    total = np.bincount(group, off, count)
    weight = np.bincount(group, np.clip(determined, 0.0, 1.0), count)
    overall = (_PRIOR_WEIGHT + total.sum()) / (_PRIOR_WEIGHT + weight.sum())
    result: Array = np.sqrt((_GROUP_WEIGHT * overall + total) / (_GROUP_WEIGHT + weight))
    return result


def traffic(strategy: Strategy, slots: int, *, over_hosts: bool = False) -> tuple[float, float]:
    """Traffic in every micro step and at the end of a step, in rounds of all parameters.

    Stages 0 and 1 reduce at the boundary, 2 in every micro step; 3 gathers twice and reduces in
    every micro step; 1 and 2 gather once a step (deepspeed 0.19.8, runtime/zero). On one slot the
    hooks that do it remain. A round between hosts counts as so many inside of one as it takes time.
    """
    by_stage = ((0.1, 2.0), (0.1, 2.0), (1.0, 1.0), (3.0, 0.1))
    micro, boundary = by_stage[strategy.stage]
    if slots == 1:
        micro, boundary = micro / 2, max(0.1, boundary / 4)
    elif over_hosts:
        micro, boundary = (
            rounds * _BETWEEN_HOSTS if rounds >= 1 else rounds for rounds in (micro, boundary)
        )
    if strategy.offload_optimizer != NONE:
        micro, boundary = micro + 1.0, boundary + 10.0
    if strategy.offload_param != NONE:
        micro += 3.0
    if NVME in (strategy.offload_optimizer, strategy.offload_param):
        micro, boundary = micro * 5, boundary * 5
    return micro, boundary


def hpz_effect() -> float:
    """Return the prior effect of hpZ on the logarithm of stage 3's time over several hosts.

    One of its three rounds, the gather of the backward pass, stays inside of a host then (ZeRO++,
    arXiv:2306.10209, section 3.2). As at the reference micro batch, and with what is believed of a
    unit of traffic.
    """
    work = 1 + math.exp(_SHARED_MEAN[_FIXED])
    unit = math.exp(_SHARED_MEAN[_MICRO_UNIT])
    rounds, spared = traffic(Strategy(3), 2, over_hosts=True)[0], _BETWEEN_HOSTS - 1
    return math.log((work + unit * (rounds - spared)) / (work + unit * rounds))
