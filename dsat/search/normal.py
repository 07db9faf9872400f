"""The standard normal distribution over arrays, in logarithms so that its tails stay apart."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # of floats, or of whole numbers where they count or point

_REACH = 30.0  # math.erfc is exact so far out; beyond, the exponent alone counts
_Z = np.linspace(-_REACH, 10.0, 8001)
_PDF = np.exp(-(_Z**2) / 2) / math.sqrt(2 * math.pi)
_CDF = np.array([math.erfc(-z / math.sqrt(2)) / 2 for z in _Z])
_LOG_CDF = np.log(_CDF)
_LOG_GAIN = np.log(_Z * _CDF + _PDF)

_HALF_OF_DRAWS = 256
_SMALLEST_SD = 1e-5  # covariances are known to rounding only
MOST_DRAWS = 16
_NEAR, _PER_UNIT = 10.0, 100
_U = np.linspace(-_NEAR, _NEAR, 2 * int(_NEAR) * _PER_UNIT + 1)
# E[max(0, z + largest of n)] is the integral of 1 - cdf^n from -z on; by n, then by z.
_ABOVE = 1 - np.interp(-_U, _Z, _CDF) ** np.arange(1, MOST_DRAWS + 1)[:, None]
_LARGEST_GAIN = (np.cumsum(_ABOVE, axis=1) - (_ABOVE + _ABOVE[:, :1]) / 2) / _PER_UNIT


def log_cdf(z: Array) -> Array:
    """The logarithm of the probability to lie below `z`."""
    logarithm: Array = np.interp(z, _Z, _LOG_CDF) + _beyond(z)
    return logarithm


def log_expected_gain(mean: Array, sd: Array) -> Array:
    """The logarithm of E[max(0, x)] for a normal x: expected improvement, if x is the improvement.

    Jones, Schonlau and Welch, J. Global Optimization 13 (1998).
    """
    z = mean / sd
    gain = np.interp(z, _Z, _LOG_GAIN)
    return np.log(sd) + np.where(z > _Z[-1], np.log(np.maximum(z, 1.0)), gain + _beyond(z))


def expected_largest_gain(mean: Array, sd: Array, draws: Array) -> Array:
    """E[max(0, x_1, ..., x_n)] for independent normal x_i that are distributed alike.

    Of draws that depend on each other positively it is a bound from above (Slepian's lemma).

    Args:
        mean: of each.
        sd: of each.
        draws: n, at most `MOST_DRAWS`; linear between whole numbers, and below 1 a part of what one
            gains.
    """
    z = mean / sd
    column = np.clip(((z + _NEAR) * _PER_UNIT).round().astype(int), 0, len(_U) - 1)
    fewer = np.clip(np.floor(draws).astype(int), 1, MOST_DRAWS - 1)
    least, next_ = _LARGEST_GAIN[fewer - 1, column], _LARGEST_GAIN[fewer, column]
    found: Array = least + np.maximum(0.0, draws - fewer) * (next_ - least)
    found = np.minimum(draws, 1.0) * (found + np.maximum(0.0, z - _NEAR))
    return sd * found


def expected_largest_gain_of(mean: Array, covariance: Array) -> float:
    """E[max(0, x_1, ..., x_n)] of normal x_i that depend on each other, by fixed random draws.

    Args:
        mean: (n,).
        covariance: (n, n).
    """
    count = len(mean)
    root = np.linalg.cholesky(covariance + _SMALLEST_SD**2 * np.eye(count))
    drawn = mean + _draws(count) @ root.T
    return float(drawn.max(axis=1).clip(0.0).mean())


@functools.cache
def _draws(count: int) -> Array:
    """Standard normal draws, each with its opposite, (2 * `_HALF_OF_DRAWS`, count)."""
    half = np.random.default_rng(0).standard_normal((_HALF_OF_DRAWS, count))
    return np.concatenate((half, -half))


def inverse_mills_ratio(z: float) -> float:
    """The inverse Mills ratio, pdf(z) / cdf(z)."""
    if z < -_REACH:
        return -z
    pdf = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return pdf / (math.erfc(-z / math.sqrt(2)) / 2)


def _beyond(z: Array) -> Any:
    return -(np.minimum(z, -_REACH) ** 2 - _REACH**2) / 2
