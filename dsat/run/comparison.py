"""The comparison of two configurations by pairs of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dsat.values import student

# Confidence of reported intervals. The number of pairs depends on their results, so an interval of
# 97.5 % for a fixed number holds in 95 % of runs (`benchmarks/winners_curse.py`).
REPORTED, CLEAR = 0.975, 0.99
_WIDEST = 100.0  # largest ratio of the ends of an interval that is shown
# Up to this number of pairs, the search's runs count towards the spread. With more than one pair,
# they do not if they differ from the pairs at this confidence.
_FEW, _DIFFERENT = 3, 0.95

# Prior of a machine's run-to-run variation, and its degrees of freedom. With these, at 5 % of
# variation and without finals, a configuration that is not better replaces the user's own in at
# most 5 % of runs (`benchmarks/winners_curse.py`).
_PRIOR_SD, _PRIOR_FREEDOM = 0.02, 3
# The same for pairs, with degrees of freedom by the number of pairs; three pairs need none. With
# these, the median interval of two pairs is no wider than that of one. Intervals hold in 96 % of
# runs at 5 % of variation, and in 92 % at 10 % (`tests/run/test_finals.py`).
_PRIOR_SD_OF_PAIRS, _PRIOR_FREEDOM_OF_PAIRS = 0.03, {1: 3, 2: 1}


@dataclass(frozen=True)
class Variation:
    """Measured run-to-run variation of a machine.

    Attributes:
        sd: standard deviation of the logarithm of a run's value.
        freedom: degrees of freedom of that estimate.
    """

    sd: float
    freedom: int


def margin_of_single_runs(
    errors: tuple[float, float], tried: int, measured: Variation | None = None
) -> float:
    """Return the half-width of the 95 % interval of the difference of two runs, in logarithms.

    It is wide enough for the best of several (Bonferroni), and includes run-to-run variation, which
    the errors within runs lack.

    Args:
        errors: standard errors of both, from the steps within each run.
        tried: number of configurations that were compared.
        measured: run-to-run variation; None if it was not measured.
    """
    freedom, squares = _PRIOR_FREEDOM, _PRIOR_FREEDOM * _PRIOR_SD**2
    if measured is not None:
        freedom += measured.freedom
        squares += measured.freedom * measured.sd**2
    level = 1 - 0.05 / max(1, tried)
    within = statistics.NormalDist().inv_cdf((1 + level) / 2) * math.hypot(*errors)
    between = student.half_width(level, freedom) * math.sqrt(2 * squares / freedom)
    return math.hypot(within, between)


@dataclass(frozen=True)
class Gain:
    """Ratio of two configurations and its 95 % confidence interval."""

    ratio: float
    low: float
    high: float

    @classmethod
    def of_log(cls, mean: float, margin: float) -> Gain:
        return cls(math.exp(mean), math.exp(mean - margin), math.exp(mean + margin))

    @property
    def is_unknown(self) -> bool:
        """Return whether the interval is too wide to be meaningful."""
        return self.high > _WIDEST * self.low


def _margin(standard_error: float, freedom: int) -> float:
    return student.half_width(REPORTED, freedom) * standard_error


def _squares_beside_drift(values: Sequence[float]) -> float:
    """Return the sum of squared residuals from a straight line."""
    slope, start = statistics.linear_regression(range(len(values)), values)
    return sum((value - start - slope * at) ** 2 for at, value in enumerate(values))


@dataclass(frozen=True)
class Comparison:
    """Result of pairs of runs, as logarithms; larger is better.

    Attributes:
        mean: mean difference within a pair, the second less the first.
        standard_error, freedom: standard error of `mean`, and its degrees of freedom.
        variation: the measured run-to-run variation.
    """

    mean: float
    standard_error: float
    freedom: int
    variation: Variation

    @classmethod
    def of_pairs(
        cls, pairs: Sequence[tuple[float, float]], before: tuple[float, float | None]
    ) -> Comparison:
        """Compare the second of each pair with the first.

        Differences and sums of the pairs have the same spread, except that a steady drift of the
        machine changes the sums. Up to three pairs are too few to estimate it well, so `before`
        counts too: the first run, and with a single pair also the second. The first trial of a run
        may differ far from all others, so with two or three pairs it does not count if it differs
        significantly (Bancroft, Annals of Mathematical Statistics 15 (1944)).

        Args:
            before: the search's run of both; None for one that did not run alone as the pairs do.
        """
        count = len(pairs)
        differences = [second - first for first, second in pairs]
        mean = statistics.fmean(differences)
        # Squares of differences, of sums, and of a run less the mean of others: each degree of
        # freedom is expected to contribute twice a run's variance.
        squares = sum((difference - mean) ** 2 for difference in differences)
        freedom = count - 1
        if count > 2:
            squares += _squares_beside_drift([first + second for first, second in pairs])
            freedom += count - 2
        more = _PRIOR_FREEDOM_OF_PAIRS.get(count, 0)
        prior = 2 * more * _PRIOR_SD_OF_PAIRS**2
        again = list(zip(before, zip(*pairs, strict=True), strict=True))[: 2 if count == 1 else 1]
        for searched, runs in again if count <= _FEW else ():
            if searched is None:
                continue
            square = 2 * (searched - statistics.fmean(runs)) ** 2 * count / (count + 1)
            expected = (squares + prior) / (freedom + more)
            limit = student.half_width(_DIFFERENT, freedom + more) ** 2 * expected
            if count == 1 or square <= limit:
                squares, freedom = squares + square, freedom + 1
        variation = Variation(math.sqrt(squares / freedom / 2), freedom)
        # An error estimated from a few differences is often far too large by chance, so use the
        # smaller margin. It misses in no more cases than both margins together.
        errors = [
            (math.sqrt(total / known / count), known)
            for total, known in ((squares, freedom), (squares + prior, freedom + more))
        ]
        return cls(mean, *min(errors, key=lambda error: _margin(*error)), variation)

    @property
    def margin(self) -> float:
        """Half-width of the 95 % confidence interval of `mean`."""
        return _margin(self.standard_error, self.freedom)

    @property
    def gain(self) -> Gain:
        return Gain.of_log(self.mean, self.margin)

    @property
    def is_better(self) -> bool:
        """Return whether the second configuration is better with 95 % confidence."""
        return self.mean > self.margin

    def is_clear(self, least: float | None) -> bool:
        """Return whether one is better with 99 % confidence, or no worthwhile gain is possible.

        Args:
            least: logarithm of the smallest worthwhile gain; None if every gain is.
        """
        margin = student.half_width(CLEAR, self.freedom) * self.standard_error
        return abs(self.mean) > margin or (least is not None and self.mean + margin < least)
