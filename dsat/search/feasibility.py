"""Chance that a configuration runs, learned from successes and failures."""

from __future__ import annotations

import math

import numpy as np

from dsat.search.normal import Array, inverse_mills_ratio, log_cdf

# How far the predicted largest micro batch may be off, in octaves, for a good prediction and for a
# bad one, and how likely it is good; of all strategies alike, and of each by itself.
_GOOD, _BAD, _CHANCE_OF_GOOD = (0.03, 0.015), (0.6, 0.2), 0.6
_REFUTED = math.log(1e-12)  # such a hypothesis is not asked any more
_BLUR = 0.01  # octaves between what runs every time and what never does
# In standard deviations of a hidden quality: a configuration fails for no want of memory in three
# of a hundred cases, and what does so shares a strategy or a value with others that do.
_SOUND, _SOUND_SD_STRATEGY, _SOUND_SD_KNOB = 2.4, 1.0, 0.4


class _Probit:
    """Bayesian probit regression: whether x @ theta + noise exceeds a threshold.

    Each outcome corrects the normal distribution of theta by matching moments, in closed form
    (assumed density filtering; Minka, MIT thesis 2001, chapter 3).
    """

    def __init__(self, mean: Array, sd: Array, noise: float) -> None:
        self._mean, self._covariance, self._noise = mean.copy(), np.diag(sd**2), noise

    def update(self, features: Array, threshold: float, above: bool) -> float:
        """Takes in an outcome; returns the logarithm of how likely the outcome had been."""
        towards = self._covariance @ features
        sd = math.sqrt(float(features @ towards) + self._noise**2)
        sign = 1.0 if above else -1.0
        z = sign * (float(features @ self._mean) - threshold) / sd
        slope = inverse_mills_ratio(z)
        self._mean = self._mean + sign * slope / sd * towards
        self._covariance = self._covariance - slope * (z + slope) / sd**2 * np.outer(
            towards, towards
        )
        return float(log_cdf(np.array(z)))

    def log_chance(self, features: Array, thresholds: Array) -> Array:
        """Return the log chance of (s, k) features to exceed (m, s) thresholds: (m, s)."""
        variance = ((features @ self._covariance) * features).sum(axis=1) + self._noise**2
        margin = (features @ self._mean)[None, :] - thresholds
        return log_cdf(margin / np.sqrt(np.maximum(variance, self._noise**2))[None, :])

    def mean(self, features: Array) -> Array:
        """The expected x @ theta of (s, k) features: (s,)."""
        mean: Array = features @ self._mean
        return mean


class Feasibility:
    """The chance that a configuration has enough memory, and that it runs for all else.

    The largest micro batch of a configuration is the predicted one, times an error that all
    strategies share, one of each and one of each setting. Two hypotheses are kept, that
    predictions are good and that they are not; what happens decides between them.

    Predictions come with each question, as binary logarithms of largest micro batches.

    Args:
        count: the number of branches.
        trusted: whether predictions are worth more than bounds from above.
        knob_mean, knob_sd: prior of each feature's effect on it, in octaves.
    """

    def __init__(self, count: int, trusted: bool, knob_mean: Array, knob_sd: Array) -> None:
        self._count = count
        mean = np.concatenate((np.zeros(1 + count), knob_mean))
        self._memory = []
        for shared, own in (_GOOD, _BAD):
            sd = np.concatenate(((shared,), np.full(count, own), knob_sd))
            self._memory.append(_Probit(mean, sd, _BLUR))
        self._log_weights = np.log([_CHANCE_OF_GOOD, 1 - _CHANCE_OF_GOOD])
        if not trusted:
            self._memory, self._log_weights = self._memory[1:], np.zeros(1)
        sound = np.concatenate(((_SOUND,), np.zeros(count + len(knob_sd))))
        spread = np.repeat((0.2, _SOUND_SD_STRATEGY, _SOUND_SD_KNOB), (1, count, len(knob_sd)))
        self._soundness = _Probit(sound, spread, 1.0)

    def update_memory(
        self, branch: int, knobs: Array, log2_largest: float, micro_batch: int, fits: bool
    ) -> None:
        """Takes in whether a trial had enough memory.

        Args:
            branch: the number of its branch.
            knobs: features of its settings, (k,).
            log2_largest: binary logarithm of the micro batch that was predicted to be the largest.
            micro_batch: the one that was tried, itself.
            fits: whether it had enough memory.
        """
        features = self._features(branch, knobs[None, :])[0]
        threshold = math.log2(micro_batch) - log2_largest
        likely = [model.update(features, threshold, fits) for model in self._memory]
        self._log_weights = self._log_weights + likely
        self._log_weights -= np.logaddexp.reduce(self._log_weights)

    def update_soundness(self, branch: int, knobs: Array, sound: bool) -> None:
        """Takes in whether settings (k,) of a branch ran but for memory."""
        self._soundness.update(self._features(branch, knobs[None, :])[0], 0.0, sound)

    def log_fits(
        self, branch: int, knobs: Array, log2_largest: Array, micro_batches: Array
    ) -> Array:
        """The logarithm of the chance to fit of (s, k) knobs and (m,) micro batches: (m, s)."""
        features = self._features(branch, knobs)
        thresholds = np.log2(micro_batches)[:, None] - log2_largest[None, :]
        chances = [
            weight + model.log_chance(features, thresholds)
            for weight, model in zip(self._log_weights, self._memory, strict=True)
            if weight > _REFUTED
        ]
        total: Array = np.logaddexp.reduce(chances)
        return np.minimum(total, 0.0)

    def log_sound(self, branch: int, knobs: Array) -> Array:
        """The logarithm of the chance to run for all but memory of (s, k) knobs: (s,)."""
        chance: Array = self._soundness.log_chance(self._features(branch, knobs), np.zeros((1, 1)))[
            0
        ]
        return chance

    def expected_largest(self, branch: int, knobs: Array, log2_largest: Array) -> Array:
        """The largest micro batch of (s, k) knobs by the likelier of the hypotheses: (s,)."""
        model = self._memory[int(np.argmax(self._log_weights))]
        largest: Array = np.exp2(log2_largest + model.mean(self._features(branch, knobs)))
        return largest

    def _features(self, branch: int, knobs: Array) -> Array:
        strategies = np.zeros((len(knobs), 1 + self._count))
        strategies[:, 0] = strategies[:, 1 + branch] = 1.0
        return np.hstack((strategies, knobs))
