"""Selection of micro batches and settings to compare."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsat.search.feasibility import Values
from dsat.search.normal import Array
from dsat.search.speed import Fit
from dsat.search.step_time import Job, acts_on_whole_step, work
from dsat.space.overrides import GAS
from dsat.space.space import Space

_FEW = 24  # so many micro batches are all compared
_NEAR_THE_EDGE = (1.0, 0.98, 0.96, 0.94, 0.91, 0.87, 0.8)
_NEAR_THE_BEST = (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25)
_TILE = 8  # samples that matrix units take at once
_MOST_SETTINGS = 24  # of a branch


class MicroBatches:
    """The micro batches that are compared, out of those that are allowed.

    Args:
        micro_batches: the allowed ones, ascending.
    """

    def __init__(self, micro_batches: Sequence[int]) -> None:
        self._all = micro_batches

    def positions(self, *, edges: Iterable[float], best: Iterable[float]) -> list[int]:
        """Return positions in the allowed micro batches, ascending.

        They are powers of two with one step between, and multiples of 8 where memory ends and
        beside the best.

        Args:
            edges: where memory should end.
            best: the micro batch of the best so far.
        """
        if len(self._all) <= _FEW:
            return list(range(len(self._all)))
        edges = list(edges)
        best = list(best)
        most = max(1.0, 2 * max([*edges, *best]))
        octaves = range(math.ceil(math.log2(most)) + 1)
        sizes = [part * 2.0**octave for octave in octaves for part in (1.0, 1.5)]
        near = [part * edge for edge in edges for part in _NEAR_THE_EDGE]
        near += [part * size for size in best for part in _NEAR_THE_BEST]
        sizes += near + [size // _TILE * _TILE for size in near if size > 2 * _TILE]
        found = {bisect.bisect_right(self._all, size) - 1 for size in sizes if size <= most}
        return sorted(position for position in found if position >= 0) or [0]


@dataclass(frozen=True)
class Row:
    """Settings as the models of speed and of failures take them; see `Points`.

    Attributes:
        values: the name and the value of each, as text.
    """

    work: Array
    knobs: Array
    values: Values


class Settings:
    """Settings of all branches by their numbers, and those among them that are compared.

    Args:
        space: what may be tried.
        job: what is trained.

    Attributes:
        num_values: number of values of knobs that have an effect of their own.
        of_whole: which of them act on the whole step; see `dsat.search.speed.Layout`.
    """

    def __init__(self, space: Space, job: Job) -> None:
        self._space, self._job = space, job
        self._settings: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._rows: dict[tuple[int, int], Row] = {}
        self._columns: dict[tuple[str, str], int] = {}
        usual: dict[str, str] = {}
        for branch in space.branches:
            for key, values in branch.knobs:
                usual.setdefault(key, _text(values[0]))
                for value in values:
                    if key != GAS and _text(value) != usual[key]:
                        self._columns.setdefault((key, _text(value)), len(self._columns))
        self.num_values = len(self._columns)
        self.of_whole = tuple(acts_on_whole_step(key) for key, _ in self._columns)
        self._texts = [
            [(key, [_text(value) for value in values]) for key, values in branch.knobs]
            for branch in space.branches
        ]

    def of(self, branch: int, index: int) -> Mapping[str, Any]:
        """Return the settings number `index` of a branch."""
        found = self._settings.get((branch, index))
        if found is None:
            found = self._settings[branch, index] = self._space.branches[branch].settings(index)
        return found

    def row(self, branch: int, index: int) -> Row:
        """Return the settings number `index` of a branch as the models take them."""
        found = self._rows.get((branch, index))
        if found is None:
            settings = self.of(branch, index)
            values = tuple((key, _text(value)) for key, value in settings.items())
            knobs = np.zeros(self.num_values)
            knobs[[self._columns[value] for value in values if value in self._columns]] = 1.0
            counted = work(self._job, self._space.strategies[branch], settings)
            found = self._rows[branch, index] = Row(counted, knobs, values)
        return found

    def promising(
        self, branch: int, best: Mapping[str, Any], fit: Fit, closed: Collection[int]
    ) -> list[int]:
        """Return numbers of settings: the first, the best, the likeliest, and one change of each.

        Args:
            branch: position of the branch.
            best: settings of the best so far, of this branch or of another.
            fit: what is known of values.
            closed: numbers of settings with which nothing is left to try.
        """
        if self._space.branches[branch].count <= _MOST_SETTINGS:
            return [n for n in range(self._space.branches[branch].count) if n not in closed]
        knobs = self._space.branches[branch].knobs
        strides = self._space.branches[branch].strides
        at_best, likeliest, hoped = 0, 0, 0
        sd = np.sqrt(np.diag(fit.covariance))
        for (key, texts), stride in zip(self._texts[branch], strides, strict=True):
            if key in best and _text(best[key]) in texts:
                at_best += stride * texts.index(_text(best[key]))
            effects, hopes = [], []
            for text in texts:
                column = self._columns.get((key, text))
                at = None if column is None else column - self.num_values
                effects.append(0.0 if at is None else float(fit.theta[at]))
                hopes.append(0.0 if at is None else float(fit.theta[at] - sd[at]))
            likeliest += stride * int(np.argmin(effects))
            hoped += stride * int(np.argmin(hopes))
        found = dict.fromkeys([0, at_best, likeliest, hoped])
        for start in (at_best, likeliest):
            for (_, values), stride in zip(knobs, strides, strict=True):
                digit = start // stride % len(values)
                found |= dict.fromkeys(
                    start + stride * (other - digit) for other in range(len(values))
                )
        return [index for index in found if index not in closed][:_MOST_SETTINGS]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
