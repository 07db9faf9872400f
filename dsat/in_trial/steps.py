"""Statistics of a trial's step times: mean, confidence interval, and outliers.

Consecutive steps are not independent: a machine is slower for a while, and then faster. The
interval models the steps as a first-order autoregressive process, and averages over the unknown
coefficient. Student's t for independent steps would give a far too narrow interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsat.values import student

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

CI_TARGET = 0.02
CONFIDENCE = 0.95
RAREST = 10  # one step in this many may be an accident; if more are long, training is the cause
_FAR = 6.0  # robust standard deviations beyond the median
_FAR_AT_LEAST = 0.1  # of the median
_COEFFICIENTS = 20
_LARGEST_COEFFICIENT = 0.97


@dataclass(frozen=True)
class StepTimes:
    """Statistics of the step times of a measurement.

    Attributes:
        mean: mean time of the ordinary steps, in the unit of the values.
        ci95: half-width of the 95 % interval of the mean, as a fraction of the mean; infinite for
            fewer than three steps.
        accidents: positions of steps that took far longer by accident; they are not in the mean.
        lost: excess time of the accidents over the mean, as a fraction of the ordinary steps' time.
    """

    mean: float
    ci95: float
    accidents: tuple[int, ...]
    lost: float


def summarize(values: Sequence[float], may_be_accident: Sequence[bool] | None = None) -> StepTimes:
    """Return statistics of step times; the interval allows for autocorrelated steps.

    Args:
        may_be_accident: for each step, whether nothing in the training (such as more tokens, or
            waiting for data) would explain a long time; by default True for all.
    """
    accidents = _accidents(values, may_be_accident or [True] * len(values))
    regular = [value for i, value in enumerate(values) if i not in accidents]
    mean = sum(regular) / len(regular)
    extra = sum(values[i] - mean for i in accidents)
    return StepTimes(mean, relative_ci95(regular), tuple(accidents), extra / sum(regular))


def relative_ci95(values: Sequence[float]) -> float:
    """Return the half-width of the 95 % interval of the mean, as a fraction of the mean.

    The steps' model is a stationary Gaussian AR(1) process with a coefficient r in [0, 0.97]. Given
    r, the mean has a t distribution (generalised least squares). The values of r are weighted by
    their marginal likelihood and the reference prior 1 / sqrt(1 - r^2) (Berger and Yang,
    "Noninformative priors and Bayesian testing for the AR(1) model", 1994). The interval is centred
    at the plain mean.

    Returns:
        Infinity for fewer than three values, which do not show r; 0 if all are equal.
    """
    import numpy as np

    count = len(values)
    if count < 3:
        return math.inf
    y = np.asarray(values, float)
    mean = float(y.mean())
    x = y - mean
    if float(np.abs(x).max()) <= 1e-9 * abs(mean):
        return 0.0
    r = np.linspace(0.0, _LARGEST_COEFFICIENT, _COEFFICIENTS)
    # With R the correlation matrix: x' inv(R) x, 1' inv(R) 1 and 1' inv(R) x.
    inner, lagged = float(x[1:-1] @ x[1:-1]), float(x[:-1] @ x[1:])
    form = (float(x @ x) + r**2 * inner - 2 * r * lagged) / (1 - r**2)
    weight = (2 + (count - 2) * (1 - r)) / (1 + r)
    shift = (x[0] + x[-1] + (1 - r) * x[1:-1].sum()) / (1 + r) / weight
    rest = form - shift**2 * weight
    freedom = count - 1
    log_posterior = (
        -0.5 * freedom * np.log(1 - r**2)
        - 0.5 * np.log(weight)
        - 0.5 * freedom * np.log(rest)
        - 0.5 * np.log(1 - r**2)
    )
    posterior = np.exp(log_posterior - log_posterior.max())
    posterior /= posterior.sum()
    scale = np.sqrt(rest / freedom / weight)

    def inside(half_width: float) -> float:
        upper = student.cdf((half_width - shift) / scale, freedom)
        return float(posterior @ (upper - student.cdf((-half_width - shift) / scale, freedom)))

    low, high = 0.0, float(np.abs(shift).max() + 100 * scale.max())
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < CONFIDENCE else (low, middle)
    return high / mean


def steps_wanted(count: int, ci95: float, limit: int) -> int:
    """Return the total number of steps before the next check: above `count`, up to `limit`."""
    target = count + 1 if math.isinf(ci95) else math.ceil(count * (ci95 / CI_TARGET) ** 2)
    # At most double: the first few steps hardly show the spread.
    return max(count + 1, min(limit, target, 2 * count))


def _accidents(values: Sequence[float], may_be_accident: Sequence[bool]) -> list[int]:
    """Return positions of far longer steps; none if frequent, or if one cannot be an accident."""
    median = statistics.median(values)
    spread = 1.4826 * statistics.median([abs(value - median) for value in values])
    bound = median + max(_FAR * spread, _FAR_AT_LEAST * median)
    positions = [i for i, value in enumerate(values) if value > bound]
    if len(positions) * RAREST > len(values) or not all(may_be_accident[i] for i in positions):
        return []
    return positions
