"""A surrogate of every configuration: whether it runs, and how long it takes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsat.search import step_time
from dsat.search.encoding import Encoding
from dsat.search.feasibility import Feasibility
from dsat.search.normal import Array
from dsat.space.space import Space
from dsat.values.objective import Objective
from dsat.values.outcome import Outcome, OutcomeKind


@dataclass(frozen=True)
class Configuration:
    """A configuration that ran, or whose time is predicted.

    Attributes:
        branch, index: of the space, the number of a branch and of settings in it.
        micro_batch, gas: samples of a micro step, and micro steps.
        knobs: features of the settings, (features,).
        log_s: natural logarithm of the time of an optimizer step, but for a constant that is the
            same for all.
        ci95: half-width of the 95 % interval of that.
    """

    branch: int
    index: int
    micro_batch: int
    gas: int
    knobs: Array
    log_s: float
    ci95: float


class Surrogate:
    """Models of memory, of failures and of time, which every outcome corrects.

    Args:
        space: what may be tried.
        objective: the metric to optimise.
        largest: the largest micro batch that settings should allow, 0 if none.
        predicted: whether that is a prediction, and no bound from above.
        begin_with: a search begins with at most so many samples in a micro batch.
        rng: decides between knobs that are all alike.

    Attributes:
        encoding: of settings.
        feasibility: whether configurations run.
        fit: the model of time.
        measured: what ran.
        log_unit: what makes seconds of `log_s`, once anything was measured.
        starved: micro batches and accumulation steps that wanted more data than there is.
    """

    def __init__(
        self,
        space: Space,
        objective: Objective,
        largest: Callable[[Mapping[str, Any]], float],
        *,
        predicted: bool,
        begin_with: int,
        rng: np.random.Generator,
    ) -> None:
        self._space = space
        self._objective = objective
        self._largest = largest
        self._settings: dict[tuple[int, int], Mapping[str, Any]] = {}
        self.encoding = Encoding(space)
        count = len(space.branches)
        prior = self.encoding.memory_prior(predicted=predicted)
        self.feasibility = Feasibility(count, predicted, *prior)
        roomiest = max(2.0 ** self.log2_largest(branch, [0])[0] for branch in range(count))
        layout = step_time.Layout(
            strategies=space.strategies,
            slots=space.slots,
            reference_micro_batch=min(begin_with, max(1.0, roomiest)),
            knobs=self.encoding.speed_prior(rng),
            over_hosts=space.slots_per_host > 0,
        )
        self.measured: list[Configuration] = []
        self.starved: list[tuple[int, int]] = []
        self.log_unit = 0.0
        self._log_units: list[float] = []
        self._gas: dict[tuple[int, int, int], int] = {}
        self.fit = _fitted(layout, [])

    def update(self, branch: int, index: int, micro_batch: int, outcome: Outcome) -> None:
        """Update the models with the outcome of a trial."""
        gas, kind = self.gas(branch, index, micro_batch), outcome.kind
        knobs = self.encoding.row(branch, index)
        short_of_memory = kind.is_out_of_memory
        if outcome.ok or short_of_memory or outcome.smaller_may_run:
            # A want of data bounds the micro batch like one of memory does.
            edge = float(self.log2_largest(branch, [index])[0])
            self.feasibility.update_memory(branch, knobs, edge, micro_batch, fits=outcome.ok)
        if outcome.smaller_may_run:
            self.starved.append((micro_batch, gas))
            if outcome.most_samples is not None:
                self.starved.append((outcome.most_samples + 1, 1))
        elif kind is not OutcomeKind.CANCELED:
            self.feasibility.update_soundness(branch, knobs, outcome.ok or short_of_memory)
        value = outcome.value(self._objective)
        if value is not None and 0 < value < math.inf:
            assert outcome.metrics is not None
            sign = 1 if self._objective.smaller_is_better else -1
            log_s = self.log_work(micro_batch, gas) + sign * math.log(value)
            ci95 = 1.96 * outcome.metrics.standard_error
            ran = Configuration(branch, index, micro_batch, gas, knobs, log_s, ci95)
            self.measured.append(ran)
            bisect.insort(self._log_units, math.log(outcome.metrics.latency / 1000) - log_s)
            self.log_unit = self._log_units[len(self._log_units) // 2]
            # At once: when it is asked for must not matter, since a fit begins with the one before.
            self.fit = _fitted(self.fit.layout, self.measured, self.fit)

    def configuration(self, branch: int, index: int, micro_batch: int) -> Configuration:
        """A configuration, its time as predicted."""
        gas, knobs = self.gas(branch, index, micro_batch), self.encoding.row(branch, index)
        unknown = Configuration(branch, index, micro_batch, gas, knobs, 0.0, 0.0)
        return replace(unknown, log_s=float(self.fit.predict(points_of([unknown]))[0][0]))

    def log2_largest(self, branch: int, indexes: Sequence[int] | Array) -> Array:
        """Binary logarithms of the largest micro batches that should fit, (n,).

        What fits is a whole number: in the middle between it and the next, the edge.
        """
        largest = [self._largest(self._settings_of(branch, int(index))) for index in indexes]
        edges: Array = np.log2(np.floor(largest) + 0.5)
        return edges

    def gas(self, branch: int, index: int, micro_batch: int) -> int:
        """The accumulation steps that settings have with a micro batch."""
        key = branch, index, micro_batch
        if key not in self._gas:
            settings = self._settings_of(branch, index)
            self._gas[key] = self._space.batch(micro_batch, settings).gas
        return self._gas[key]

    def _settings_of(self, branch: int, index: int) -> Mapping[str, Any]:
        found = self._settings.get((branch, index))
        if found is None:
            found = self._settings[branch, index] = self._space.branches[branch].settings(index)
        return found

    def log_work(self, micro_batch: Any, gas: Any) -> Any:
        """Return the offset between the logarithms of a rate and a time."""
        return 0.0 if self._objective.smaller_is_better else np.log(micro_batch * gas)

    def incumbent(
        self, fit: step_time.Fit, known: Sequence[Configuration]
    ) -> tuple[float, Configuration | None]:
        """The best by the model, which noise misleads less than a measurement.

        Returns:
            The logarithm of its rate (or of the inverse of its time), 0 without any; and itself.
        """
        if not known:
            return 0.0, None
        points = points_of(known)
        gains = self.log_work(points.micro_batch, points.gas) - fit.predict(points)[0]
        best = int(np.argmax(gains))
        return float(gains[best]), known[best]


def points_of(configurations: Sequence[Configuration]) -> step_time.Points:
    """Configurations as the model of time takes them."""
    return step_time.Points(
        strategy=np.array([c.branch for c in configurations], int),
        micro_batch=np.array([c.micro_batch for c in configurations], float),
        gas=np.array([c.gas for c in configurations], float),
        knobs=np.array([c.knobs for c in configurations], float),
    )


def _fitted(
    layout: step_time.Layout, measured: Sequence[Configuration], start: step_time.Fit | None = None
) -> step_time.Fit:
    log_s = np.array([c.log_s for c in measured], float)
    ci95 = np.array([c.ci95 for c in measured], float)
    return step_time.fit(layout, points_of(measured), log_s, ci95, start=start)
