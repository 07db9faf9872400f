"""Seconds of traced configurations on named cards, with an interval.

The physical model (`dsat.search.step_time`) with terms as the table of cards has them. Trials that
were measured, on the same cards or others, correct the terms and narrow the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dsat.search import step_time
from dsat.search.normal import Array
from dsat.search.speed import Fit, Layout, Points
from dsat.search.step_time import COLUMNS, TERMS, Hardware, Job
from dsat.search.traced_work import PRIORS
from dsat.values.zero_strategy import Strategy

# Standard deviation of the logarithm of a step, whatever the terms: of any configuration, and what
# trials on one kind of card do not tell of another.
_SD, _OTHER_CARD_SD = 0.05, 0.10
_NORMAL_90 = 1.645
# Columns that a part of the step consists of; what is left are the kernels.
_PARTS = {
    "communication": (
        *("reduced", "reduced_last", "reductions", "waited", "gathered", "gathers"),
        *("boundary", "boundaries"),
    ),
    "optimizer": ("optimizer", "groups", "host_optimizer"),
    "copies": ("copies", "transferred", "transferred_last"),
}
_HOST = ("launches", "hooks")


@dataclass(frozen=True)
class StepTime:
    """A predicted optimizer step.

    Attributes:
        seconds: of the step.
        low_s, high_s: between them with 90 %.
        parts: seconds by part: `kernels`, `launches` (the host, beyond the kernels),
            `communication` that nothing hides, `optimizer`, `copies`.
    """

    seconds: float
    low_s: float
    high_s: float
    parts: dict[str, float]


class ProjectedSpeed:
    """Predictions for one kind of card.

    Args:
        hardware: of the card.
        strategies: all that will be asked about or were measured.
    """

    def __init__(self, hardware: Hardware, strategies: Sequence[Strategy]) -> None:
        self._strategies = list(strategies)
        priors = {name: PRIORS.get(name, (0.0, sd)) for name, (_, sd) in TERMS.items()}
        job = Job(1.0, 1.0, 2, 1.0, 1, hardware=hardware)
        self._layout = Layout(job, self._strategies, 0, priors)
        self._fit = Fit.prior(self._layout)
        self._sd = _SD

    def calibrated(
        self, measured_on: Hardware, points: Points, log_s: Array, error: Array
    ) -> ProjectedSpeed:
        """Return predictions that are corrected by trials.

        Args:
            measured_on: the hardware of the trials.
            points: their configurations, of `points`.
            log_s: natural logarithms of the seconds of their steps.
            error: the standard error of each.
        """
        layout = replace(self._layout, job=replace(self._layout.job, hardware=measured_on))
        found = ProjectedSpeed(self._layout.job.hardware, self._strategies)
        start = Fit.prior(layout)
        start.theta[step_time.COMPUTE] = 0.0  # what the script reaches is told by its trials alone
        fit = start.updated(points, log_s, error)
        found._fit = replace(fit, layout=self._layout)
        other = measured_on != self._layout.job.hardware
        found._sd = math.hypot(_SD, fit.misfit, _OTHER_CARD_SD if other else 0.0)
        return found

    def points(self, work: Array, strategy: Strategy, micro_batch: int, gas: int) -> Points:
        """Return one configuration, with its work (of `traced_work.work_of`)."""
        return Points(
            strategy=np.array([self._strategies.index(strategy)]),
            work=work[None, :],
            knobs=np.zeros((1, 0)),
            micro_batch=np.array([float(micro_batch)]),
            gas=np.array([float(gas)]),
            room=np.ones(1),
        )

    def predict(self, points: Points) -> StepTime:
        """Predict the step of one configuration."""
        mean, sd = self._fit.predict(points)
        spread = math.exp(_NORMAL_90 * math.hypot(float(sd[0]), self._sd))
        seconds = math.exp(mean[0])
        return StepTime(seconds, seconds / spread, seconds * spread, self._parts(points, seconds))

    def _parts(self, points: Points, seconds: float) -> dict[str, float]:
        """Divide a step by what it would take without the columns of each part."""
        left, before, parts = points, self._physical(points), {}
        scale = seconds / before
        for name, columns in _PARTS.items():
            left = _without(left, columns)
            after = self._physical(left)
            parts[name] = scale * (before - after)
            before = after
        kernels = min(before, self._physical(_without(left, _HOST)))
        return {"kernels": scale * kernels, "launches": scale * (before - kernels), **parts}

    def _physical(self, points: Points) -> float:
        hardware, theta = self._layout.job.hardware, self._fit.theta[: len(TERMS)]
        total, _ = step_time.seconds(
            hardware, theta, points.work, points.micro_batch, points.gas, points.room
        )
        return float(total.s[0])


def _without(points: Points, columns: Sequence[str]) -> Points:
    work = points.work.copy()
    work[:, [COLUMNS.index(name) for name in columns]] = 0.0
    return replace(points, work=work)
