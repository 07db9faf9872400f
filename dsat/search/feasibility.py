"""Chance that a configuration runs, from successes and failures."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from dsat.search.normal import Array
from dsat.values.outcome import Outcome, OutcomeKind

# Octaves between the largest micro batch and the predicted one: a Cauchy distribution, because
# predictions are good or fail altogether. Center and scale where it is only a bound, where it is
# predicted for processor cores and for devices, and where a trial near the predicted end has run.
_BOUNDED, _ON_CORES, _PREDICTED, _CONFIRMED = (-1.0, 0.5), (0.0, 0.15), (0.05, 0.05), (0.05, 0.015)
_NEAR = -0.4  # octaves
Values = Sequence[tuple[str, str]]
"""Names of settings and their values, as text."""

_LEAST = 1e-9  # chance
_OF_A_HANG = 4.0  # failures of another kind, since it takes a trial's whole time limit
_UNSOUND = (OutcomeKind.ERROR, OutcomeKind.INVALID, OutcomeKind.TIMEOUT)


class Feasibility:
    """Knowledge of where memory ends in each strategy, and of values that fail otherwise.

    The largest micro batch that fits is expected near its prediction, between those that ran and
    those that did not. Both bounds are kept by strategy, relative to the prediction.

    Args:
        count: number of strategies.
        predicted: whether micro batches are compared with a prediction, or with a bound from above.
        on_device: whether slots have memory of their own, which can be predicted better.
    """

    def __init__(self, count: int, *, predicted: bool, on_device: bool) -> None:
        self._predicted = predicted
        self._usual = (_PREDICTED if on_device else _ON_CORES) if predicted else _BOUNDED
        self._ran = np.full(count, -math.inf)  # octaves above the predicted largest micro batch
        self._failed = np.full(count, math.inf)
        # On a slot; how much of the host a strategy takes says nothing of others.
        self._failed_on_slot = math.inf
        self._sound: Counter[tuple[str, str]] = Counter()
        self._unsound: dict[tuple[str, str], float] = defaultdict(float)

    def update(self, branch: int, values: Values, octaves: float, outcome: Outcome) -> None:
        """Take in the end of a trial.

        Args:
            branch: position of the strategy.
            values: of its settings.
            octaves: of its micro batch above the largest that was predicted to fit.
            outcome: how it ended.
        """
        if outcome.ok:
            self._ran[branch] = max(self._ran[branch], octaves)
            self._failed[branch] = max(self._failed[branch], self._ran[branch] + 1e-3)
        elif outcome.kind.is_out_of_memory or outcome.smaller_may_run:
            self._failed[branch] = min(self._failed[branch], octaves)
            if outcome.kind is not OutcomeKind.HOST_OOM:
                self._failed_on_slot = min(self._failed_on_slot, octaves)
            self._ran[branch] = min(self._ran[branch], octaves - 1e-3)
        if outcome.ok or outcome.kind.is_out_of_memory:
            self._sound.update(values)
        elif outcome.kind in _UNSOUND and not outcome.smaller_may_run:
            # The blame is shared by what has never run; if all has, it may be any of them.
            suspects = [value for value in values if not self._sound[value]]
            blame = _OF_A_HANG if outcome.kind is OutcomeKind.TIMEOUT else 1.0
            for value in suspects or values:
                self._unsound[value] += blame / max(1, len(suspects))

    def fits(self, branch: int, octaves: Array) -> Array:
        """Return the chance to have enough memory, (n,), by octaves above what is predicted."""
        center, scale = self._usual
        if self._predicted and self._ran.max() > _NEAR and math.isinf(self._failed_on_slot):
            center, scale = _CONFIRMED
        center = min(center, self._failed_on_slot)
        low, high, here = (
            0.5 + np.arctan((at - center) / scale) / math.pi
            for at in (self._ran[branch], self._failed[branch], octaves)
        )
        chance: Array = np.clip((high - here) / max(high - low, _LEAST), _LEAST, 1.0)
        return chance

    def runs(self, values: Values) -> float:
        """Return the chance to run but for memory: that of the worst of the values."""
        return min(map(self._is_sound, values), default=1.0) if self._unsound else 1.0

    def _is_sound(self, value: tuple[str, str]) -> float:
        """Return the chance of one value; of one that never ran it falls fast."""
        ran, failed = self._sound[value], self._unsound.get(value, 0.0)
        return (1 + ran) / (1 + ran + failed) if ran else 1 / (1 + (2 * failed) ** 2)
