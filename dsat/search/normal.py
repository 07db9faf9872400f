"""Expected improvement of normal variables, in log space, so the tails do not underflow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]  # of floats; of integers for counts and positions

_REACH = 30.0  # math.erfc is exact up to here; beyond, the exponent dominates
_Z = np.linspace(-_REACH, 10.0, 8001)
_PDF = np.exp(-(_Z**2) / 2) / math.sqrt(2 * math.pi)
_CDF = np.array([math.erfc(-z / math.sqrt(2)) / 2 for z in _Z])
_LOG_GAIN = np.log(_Z * _CDF + _PDF)


def log_expected_gain(mean: Array, sd: Array) -> Array:
    """Return the log of the expected improvement, E[max(0, x)], of normal variables x, (n,).

    Jones, Schonlau and Welch, J. Global Optimization 13 (1998).
    """
    z = mean / sd
    gain = np.interp(z, _Z, _LOG_GAIN)
    beyond = (np.minimum(z, -_REACH) ** 2 - _REACH**2) / 2
    return np.log(sd) + np.where(z > _Z[-1], np.log(np.maximum(z, 1.0)), gain - beyond)
