"""The comparison of two configurations by pairs of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_PAIRS = 2  # with fewer there is no spread to estimate
# Two-sided quantiles of Student's t for 1..30 degrees of freedom.
_T97 = (
    *(21.205, 5.643, 3.896, 3.298, 3.003, 2.829, 2.715, 2.634, 2.574, 2.527),
    *(2.491, 2.461, 2.436, 2.415, 2.397, 2.382, 2.368, 2.356, 2.346, 2.336),
    *(2.328, 2.320, 2.313, 2.307, 2.301, 2.296, 2.291, 2.286, 2.282, 2.278),
)
_T99 = (
    *(63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169),
    *(3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898, 2.878, 2.861, 2.845),
    *(2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750),
)


def student_t97(freedom: int) -> float:
    """Half-width of a 97 % confidence interval in standard errors."""
    return _T97[freedom - 1] if freedom <= len(_T97) else 2.170 + 3.2 / freedom


def student_t99(freedom: int) -> float:
    """Half-width of a 99 % confidence interval in standard errors."""
    return _T99[freedom - 1] if freedom <= len(_T99) else 2.576 + 5.1 / freedom


@dataclass(frozen=True)
class Gain:
    """Ratio of two configurations and its 95 % confidence interval."""

    ratio: float
    low: float
    high: float

    @classmethod
    def of_log(cls, mean: float, margin: float) -> Gain:
        return cls(math.exp(mean), math.exp(mean - margin), math.exp(mean + margin))


@dataclass(frozen=True)
class Comparison:
    """Result of pairs of runs, as logarithms of values of which the larger is better.

    Attributes:
        mean: of the differences within the pairs.
        standard_error: of `mean`.
        freedom: degrees of freedom behind `standard_error`.
        noise: the standard deviation of one run of one configuration.
    """

    mean: float
    standard_error: float
    freedom: int
    noise: float

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[float, float]]) -> Comparison:
        """Compares the second of each pair with the first.

        From three pairs on, the spread of their differences counts. That of two differences says
        next to nothing; there the spread of each configuration's own runs does, which is no smaller
        if the machine drifts.

        Args:
            pairs: two at least.
        """
        count = len(pairs)
        assert count >= LEAST_PAIRS
        differences = [second - first for first, second in pairs]
        if count > 2:
            spread, freedom = statistics.variance(differences), count - 1
        else:
            spread = sum(statistics.variance(runs) for runs in zip(*pairs, strict=True))
            freedom = 2 * (count - 1)
        return cls(
            statistics.fmean(differences),
            math.sqrt(spread / count),
            freedom,
            math.sqrt(spread / 2),
        )

    @property
    def gain(self) -> Gain:
        return Gain.of_log(self.mean, student_t97(self.freedom) * self.standard_error)

    @property
    def is_better(self) -> bool:
        """True if the second is better with 95 % confidence."""
        return self.mean > student_t97(self.freedom) * self.standard_error

    @property
    def is_clear(self) -> bool:
        """True if one of them is better with 99 % confidence."""
        return abs(self.mean) > student_t99(self.freedom) * self.standard_error
