"""Student's t distribution with numpy alone, since a cluster's containers may lack SciPy."""

from __future__ import annotations

import functools
import math
from typing import Any


@functools.lru_cache(maxsize=256)
def half_width(level: float, freedom: int) -> float:
    """Return the half-width of a two-sided confidence interval, in standard errors.

    Args:
        level: confidence level, between 0 and 1.
        freedom: degrees of freedom, at least 1.
    """
    import numpy as np

    angles, cumulated = _table(freedom)
    angle = float(np.interp((1 + level) / 2, cumulated, angles))
    return math.sqrt(freedom) * math.tan(angle)


def cdf(x: Any, freedom: int) -> Any:
    """Return the cumulative distribution function at each value of an array."""
    import numpy as np

    return np.interp(np.arctan(x / math.sqrt(freedom)), *_table(freedom))


@functools.lru_cache(maxsize=64)
def _table(freedom: int) -> tuple[Any, Any]:
    """Return angles a and their CDF: t = sqrt(freedom) tan(a), density ~ cos(a)^(freedom-1)."""
    import numpy as np

    angles = np.linspace(-math.pi / 2, math.pi / 2, 4001)
    density = np.cos(angles) ** (freedom - 1)
    cumulated = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    return angles, cumulated / cumulated[-1]
