"""Settings as numbers, for the models that a search learns."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsat.inputs.script_args import CHECKPOINTING
from dsat.search.normal import Array
from dsat.search.step_time import KnobPrior, hpz_effect
from dsat.space.knobs import HPZ
from dsat.space.overrides import GAS, SCRIPT_SWITCHES
from dsat.space.space import Space

# Effects on the logarithm of the step time: of a value wherever it is used, of the same value in
# one strategy, and of a number's size by each power of ten.
_SHARED_SD, _OWN_SD, _TREND_SD = 0.02, 0.005, 0.01
_TREND = -0.006  # small buckets and groups need more operations
# Recomputing the forward pass takes a quarter of the time more, and saves most of the activations.
_RECOMPUTE_TIME = (0.25, 0.1)
_RECOMPUTE_OCTAVES = (1.5, 1.0)
# A second copy of the parameters helps as much as links between hosts are slower, which varies.
_HPZ_SD = 0.1
# Effects on the binary logarithm of the largest micro batch.
_MEMORY_SD = 0.01
_MEMORY_TREND_SD = 0.03
# All of it is meant relative to the first value of a knob, DeepSpeed's default or the user's own.


class Encoding:
    """Features of the settings of every branch; those of its first settings are all zero.

    The accumulation steps are no feature: they are part of the batch.

    Attributes:
        tables: for each branch and each of its knobs the features of its values,
            (values, features).
    """

    def __init__(self, space: Space) -> None:
        self._branches = space.branches
        self._slots_per_host = space.slots_per_host
        columns: dict[tuple[Any, ...], int] = {}
        for number, branch in enumerate(space.branches):
            for key, values in branch.knobs:
                if key == GAS:
                    continue
                if all(_is_size(value) for value in values):
                    columns.setdefault((key,), len(columns))
                for value in values:
                    columns.setdefault((key, _text(value)), len(columns))
                    columns.setdefault((key, _text(value), number), len(columns))
        self._columns = columns
        self.count = len(columns)
        self.tables = [
            [self._table(number, key, values) for key, values in branch.knobs]
            for number, branch in enumerate(space.branches)
        ]

    def row(self, branch: int, index: int) -> Array:
        """The features of the settings number `index` of a branch."""
        row: Array = self.rows(branch, np.array([index]))[0]
        return row

    def rows(self, branch: int, indexes: Array) -> Array:
        """The features of several settings of a branch, (n, features)."""
        remaining = np.asarray(indexes)
        features = np.zeros((len(remaining), self.count))
        for table in self.tables[branch]:
            remaining, digits = np.divmod(remaining, len(table))
            features += table[digits]
        return features

    def speed_prior(self, rng: np.random.Generator) -> KnobPrior:
        """Return the prior of effects on time; `rng` breaks ties between knobs."""
        kinds = np.array([len(key) - 1 for key in self._columns], int)
        sd = np.array((_TREND_SD, _SHARED_SD, _OWN_SD))[kinds]
        mean = np.where(kinds == 0, _TREND, 0.0) + 0.05 * sd * rng.standard_normal(self.count)
        keys = list(dict.fromkeys(key[0] for key in self._columns))
        group = np.array([keys.index(key[0]) for key in self._columns], int)
        # DeepSpeed's own settings; the script's switches change what is done with each sample.
        diluted = np.array([key[0] not in SCRIPT_SWITCHES for key in self._columns], bool)
        switch = self._columns.get((CHECKPOINTING, _text(True)))
        if switch is not None:
            mean[switch], sd[switch] = _RECOMPUTE_TIME
            group[switch] = -1
        for size in range(2, self._slots_per_host + 1):
            column = self._columns.get((HPZ, _text(size)))
            if column is not None:
                mean[column], sd[column] = hpz_effect(), _HPZ_SD
                group[column] = -1
        return KnobPrior(mean, sd, group, diluted)

    def memory_prior(self, *, predicted: bool) -> tuple[Array, Array]:
        """Mean and standard deviation of effects on the largest micro batch, in octaves.

        Args:
            predicted: they are relative to predictions that know the switches of the script.
        """
        mean = np.zeros(self.count)
        sd = np.array([_MEMORY_TREND_SD if len(k) == 1 else _MEMORY_SD for k in self._columns])
        switch = self._columns.get((CHECKPOINTING, _text(True)))
        if switch is not None:
            mean[switch], sd[switch] = _RECOMPUTE_OCTAVES
            if predicted:
                mean[switch] = 0.0
        return mean, sd

    def _table(self, branch: int, key: str, values: Sequence[Any]) -> Array:
        table: Array = np.zeros((len(values), self.count))
        if key == GAS:
            return table
        trend = self._columns.get((key,))
        for row, value in zip(table, values, strict=True):
            row[self._columns[key, _text(value)]] = 1.0
            row[self._columns[key, _text(value), branch]] = 1.0
            if trend is not None:
                row[trend] = math.log10(value)
        table -= table[0].copy()
        return table


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
