"""Probability that a configuration runs, from successes and failures of trials."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dsat.search.normal import Array
from dsat.values.outcome import Outcome, OutcomeKind

Values = Sequence[tuple[str, str]]
"""Names of settings and their values, as JSON text."""

# Predictions are either good or far off. So the log2 ratio of the largest micro batch that fits to
# the predicted one has a Cauchy distribution. These are its center and scale: without a prediction
# (activations alone give an upper bound), on CPU cores, and on devices.
_BOUNDED, _ON_CORES, _PREDICTED = (-1.0, 0.5), (0.0, 0.15), (0.05, 0.05)
# Once a trial ran above the log2 ratio `_NEAR`, predictions are good: the scale is multiplied by
# `_CONFIRMED`. Without this, the worst replay ends at 96.5 % instead of 97.2 % (see `choice`).
_NEAR, _CONFIRMED = -0.4, 0.3
# Scale after a failure below the predicted limit, as a multiple of the distance between the two.
# Each failure more than doubles the next step down, so a few trials correct a wrong prediction.
_SURPRISED = 2.0
_LEAST = 1e-9  # smallest probability
_HANG_WEIGHT = 4.0  # a timeout counts as this many failures, because it wastes the whole time limit


class Ended(NamedTuple):
    """A finished trial.

    Attributes:
        strategy: position of the trial's branch.
        octaves: log2 of the ratio of its micro batch to the largest predicted to fit.
    """

    strategy: int
    values: Values
    octaves: float
    outcome: Outcome

    @property
    def is_too_large(self) -> bool:
        """Return whether a smaller micro batch may run, because memory, time or data ran out."""
        kind = self.outcome.kind
        ended_early = kind.is_out_of_memory or kind is OutcomeKind.TIMEOUT
        return ended_early or self.outcome.smaller_may_run


class Feasibility:
    """Probability that a configuration runs: that memory suffices, and that no setting fails.

    The largest micro batch that fits is expected near its prediction, above the micro batches that
    ran and below those that failed. Both bounds are kept for each strategy.

    Args:
        count: number of strategies.
        predicted: whether `Ended.octaves` are relative to predictions, not to upper bounds.
        on_device: whether devices have separate memory, which is easier to predict.
    """

    def __init__(
        self, ended: Sequence[Ended], count: int, *, predicted: bool, on_device: bool
    ) -> None:
        self._ran = [-math.inf] * count  # log2 over the predicted largest micro batch
        self._failed = [math.inf] * count
        self._sound: Counter[tuple[str, str]] = Counter()
        self._unsound: dict[tuple[str, str], float] = defaultdict(float)
        for trial in ended:
            self._bound(trial)
        failed = [t for t in ended if not t.outcome.ok]
        # A lack of host memory depends on the strategy, so it says nothing about other strategies.
        slot_failures = (t for t in failed if t.outcome.kind is not OutcomeKind.HOST_OOM)
        failed_on_slot = min((e.octaves for e in slot_failures if e.is_too_large), default=math.inf)
        self._blame([t for t in failed if t.outcome.is_unsound], ended)
        center, scale = (_PREDICTED if on_device else _ON_CORES) if predicted else _BOUNDED
        if failed_on_slot < center:
            scale = max(scale, _SURPRISED * (center - failed_on_slot))
            center = failed_on_slot
        elif predicted and max(self._ran, default=-math.inf) > _NEAR:
            scale *= _CONFIRMED
        self._center, self._scale = center, scale

    def _bound(self, trial: Ended) -> None:
        """Update a strategy's bounds by a trial; if trials conflict, the latest counts."""
        branch, octaves = trial.strategy, trial.octaves
        if trial.outcome.ok:
            self._ran[branch] = max(self._ran[branch], octaves)
            self._failed[branch] = max(self._failed[branch], self._ran[branch] + 1e-3)
        elif trial.is_too_large:
            self._failed[branch] = min(self._failed[branch], octaves)
            self._ran[branch] = min(self._ran[branch], octaves - 1e-3)

    def _blame(self, failures: Sequence[Ended], ended: Sequence[Ended]) -> None:
        """Blame failures on values that never ran; if all ran, on all values (timeouts on none)."""
        for trial in ended if failures else ():
            if trial.outcome.ok or trial.outcome.kind.is_out_of_memory:
                self._sound.update(trial.values)
        for trial in failures:
            is_timeout = trial.outcome.kind is OutcomeKind.TIMEOUT
            suspects = [value for value in trial.values if not self._sound[value]]
            if is_timeout and not suspects:
                continue  # the micro batch is too large
            blame = _HANG_WEIGHT if is_timeout else 1.0
            for value in suspects or trial.values:
                self._unsound[value] += blame / max(1, len(suspects))

    def fits(self, strategy: Any, octaves: Array) -> Array:
        """Return the probability that memory suffices, (n,).

        Args:
            strategy: position of the branch, one for all configurations or one for each, (n,).
            octaves: as in `Ended`, (n,).
        """
        low, high, here = (
            0.5 + np.arctan((bounds - self._center) / self._scale) / math.pi
            for bounds in (np.array(self._ran)[strategy], np.array(self._failed)[strategy], octaves)
        )
        chance: Array = np.clip((high - here) / np.maximum(high - low, _LEAST), _LEAST, 1.0)
        return chance

    def runs(self, values: Values) -> float:
        """Return the probability to run if memory suffices: the lowest one among the values."""
        return min(map(self._is_sound, values), default=1.0) if self._unsound else 1.0

    def _is_sound(self, value: tuple[str, str]) -> float:
        """Return the probability that a value runs; failures lower it most if it never ran."""
        ran, failed = self._sound[value], self._unsound.get(value, 0.0)
        return (1 + ran) / (1 + ran + failed) if ran else 1 / (1 + (2 * failed) ** 2)
