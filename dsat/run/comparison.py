"""Comparison of two configurations: by pairs of runs, or by a single run of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dsat.values import student

# Confidence levels of reported intervals, and of a clear result. Because the number of pairs
# depends on their results, an interval of 97.5 % for a fixed number of pairs contains the true gain
# in 95 % of searches only (`benchmarks/winners_curse.py`).
REPORTED, CLEAR = 0.975, 0.99
_WIDEST = 100.0  # an interval with a larger ratio of its ends is not shown
# Up to `_FEW` pairs, runs of the search also count as measurements of the run-to-run variation.
# With two or three pairs, such a run does not count if it differs from the pairs at the confidence
# `_DIFFERENT`.
_FEW, _DIFFERENT = 3, 0.95

# Prior of the run-to-run variation: standard deviation and degrees of freedom. With these values,
# if runs vary by 5 % and there are no finals, at most 5 % of searches recommend a configuration
# that is not better than the user's own (`benchmarks/winners_curse.py`).
_PRIOR_SD, _PRIOR_FREEDOM = 0.02, 3
# The prior's standard deviations for one and for two pairs; see `_prior_freedom`. With them, if
# runs vary by 5 %, 96 % of the intervals contain the true gain. If runs vary by 10 %, 91 % do with
# one pair, and 94 % with two (`tests/run/test_finals.py`). More pairs need no prior.
_PRIOR_SD_OF_PAIRS = {1: 0.03, 2: 0.05}
_USUAL_SD = 0.03  # of runs, to judge whether the first trial differs from two pairs


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
    """Return the half-width of the 95 % interval of the log gain between two single runs.

    If the better run is the best of several, their number widens the interval (Bonferroni).
    Run-to-run variation, which the steps within a run do not show, is included.

    Args:
        errors: relative standard errors of both runs, from the steps within each.
        tried: number of configurations, or of trials, from which the better one was chosen.
        measured: run-to-run variation; None if it was not measured.
    """
    freedom, squares = _PRIOR_FREEDOM, _PRIOR_FREEDOM * _PRIOR_SD**2
    if measured is not None:
        freedom += measured.freedom
        squares += measured.freedom * measured.sd**2
    level = 1 - 0.05 / max(1, tried)
    noise = statistics.NormalDist().inv_cdf((1 + level) / 2) * math.hypot(*errors)
    between = student.half_width(level, freedom) * math.sqrt(2 * squares / freedom)
    return math.hypot(noise, between)


@dataclass(frozen=True)
class Gain:
    """Ratio by which one configuration is better than another, with its 95 % interval."""

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
    """Return the sum of squared residuals from a fitted straight line, a steady drift."""
    slope, start = statistics.linear_regression(range(len(values)), values)
    return sum((value - start - slope * position) ** 2 for position, value in enumerate(values))


def _prior_freedom(pairs: int, searched: int) -> int:
    """Return the prior's degrees of freedom, given the numbers of pairs and of search runs."""
    return {1: 1 + searched, 2: 1}.get(pairs, 0)


@dataclass(frozen=True)
class Comparison:
    """Result of pairs of runs, in logarithms of their values; a larger value is better.

    Attributes:
        mean: mean over the pairs of the second log value minus the first.
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
        """Compare the second configuration of the pairs with the first.

        Run-to-run variation is estimated from the differences within pairs, and from the sums of
        pairs after a steady drift of the machine is subtracted. Up to three pairs are too few for a
        good estimate, so the search's run of the first configuration counts too; with a single
        pair, the second's too. With two or three pairs, a run that differs significantly is
        dropped, because the first trial of a search may differ much from all others (Bancroft,
        Annals of Mathematical Statistics 15 (1944)).

        Args:
            pairs: log values of the first and the second configuration.
            before: log values of both in the search; None for a run that did not run alone.
        """
        count = len(pairs)
        differences = [second - first for first, second in pairs]
        mean = statistics.fmean(differences)
        # Sum of squared deviations of differences, of sums, and of the search's runs. Each degree
        # of freedom is expected to add twice the variance of a run.
        squares = sum((difference - mean) ** 2 for difference in differences)
        freedom = count - 1
        if count > 2:
            squares += _squares_beside_drift([first + second for first, second in pairs])
            freedom += count - 2
        extra = _prior_freedom(count, sum(searched is not None for searched in before))
        prior, usual = (2 * extra * sd**2 for sd in (_PRIOR_SD_OF_PAIRS.get(count, 0), _USUAL_SD))
        reruns = list(zip(before, zip(*pairs, strict=True), strict=True))[: 2 if count == 1 else 1]
        for searched, runs in reruns if count <= _FEW else ():
            if searched is None:
                continue
            square = 2 * (searched - statistics.fmean(runs)) ** 2 * count / (count + 1)
            expected = (squares + usual) / (freedom + extra)
            limit = student.half_width(_DIFFERENT, freedom + extra) ** 2 * expected
            if count == 1 or square <= limit:
                squares, freedom = squares + square, freedom + 1
        variation = Variation(math.sqrt(squares / freedom / 2), freedom)
        # A standard error from few differences is often far too large by chance. So take the
        # smaller of the margins with and without the prior. It misses the true gain no more often
        # than the two together.
        errors = [
            (math.sqrt(total / degrees / count), degrees)
            for total, degrees in ((squares, freedom), (squares + prior, freedom + extra))
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
        """Return whether further pairs are unnecessary.

        This is so if one configuration is better, or if no worthwhile gain is possible, with 99 %
        confidence.

        Args:
            least: logarithm of the smallest worthwhile gain; None if every gain is worthwhile.
        """
        margin = student.half_width(CLEAR, self.freedom) * self.standard_error
        return abs(self.mean) > margin or (least is not None and self.mean + margin < least)
