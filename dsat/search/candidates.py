"""Selection of micro batches and settings to compare."""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
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
_OCTAVES = 4  # below the smallest of these that are compared: the best moves further down
_TILE = 8  # samples that matrix units take at once
_MOST_SETTINGS = 24  # of a branch
_ANY_OTHER = ""  # value of a switch


def compared_positions(
    micro_batches: Sequence[int], *, edges: Sequence[float], best: Sequence[float]
) -> list[int]:
    """Return which micro batches are compared, as positions in the allowed ones, ascending.

    They are powers of two with one step between, up to twice the largest given size and down to a
    sixteenth of the smallest, and multiples of 8 where memory ends and beside the best.

    Args:
        micro_batches: the allowed ones, ascending.
        edges: where memory should end.
        best: the micro batch of the best so far; without one, sizes from 1 on are compared.
    """
    if len(micro_batches) <= _FEW:
        return list(range(len(micro_batches)))
    most = max(1.0, 2 * max([*edges, *best]))
    least = max(1.0, min([*edges, *best])) if best else 1.0
    first = max(0, math.floor(math.log2(least)) - _OCTAVES)
    octaves = range(first, math.ceil(math.log2(most)) + 1)
    sizes = [part * 2.0**octave for octave in octaves for part in (1.0, 1.5)]
    near = [part * edge for edge in edges for part in _NEAR_THE_EDGE]
    near += [part * size for size in best for part in _NEAR_THE_BEST]
    sizes += near + [size // _TILE * _TILE for size in near if size > 2 * _TILE]
    found = {bisect.bisect_right(micro_batches, size) - 1 for size in sizes if size <= most}
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


@dataclass(frozen=True)
class _Knob:
    """A knob of a branch.

    Attributes:
        digits: positions of its values, by their text.
        columns: of the effects of each value, (number of values, 2); one too large for none.
    """

    key: str
    digits: Mapping[str, int]
    columns: Array


class Settings:
    """Settings of all branches by their numbers, and those among them that are compared.

    Attributes:
        num_values: number of values of knobs that have an effect of their own.
        of_whole: which of them act on the whole step; see `dsat.search.speed.Layout`.
    """

    def __init__(self, space: Space, job: Job) -> None:
        self._space, self._job = space, job
        self._settings: dict[tuple[int, int], Mapping[str, Any]] = {}
        self._rows: dict[tuple[int, int], Row] = {}
        self._columns: dict[tuple[str, str], int] = {}
        numbers: dict[str, None] = {}  # switches with several numbers beside the usual one
        usual: dict[str, str] = {}
        for branch in space.branches:
            for key, values in branch.knobs:
                usual.setdefault(key, _text(values[0]))
                for value in values:
                    if key != GAS and _text(value) != usual[key]:
                        self._columns.setdefault((key, _text(value)), len(self._columns))
                if acts_on_whole_step(key) and len(values) > 2 and all(map(_is_number, values)):
                    numbers[key] = None
        # If one number of workers is faster than the user's, the others rather are as well.
        self._shared = {key: len(self._columns) + place for place, key in enumerate(numbers)}
        self._columns |= {(key, _ANY_OTHER): column for key, column in self._shared.items()}
        self.num_values = len(self._columns)
        self.of_whole = tuple(acts_on_whole_step(key) for key, _ in self._columns)
        self._knobs = [
            [self._knob(key, values) for key, values in branch.knobs] for branch in space.branches
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
            own = [value for value in values if value in self._columns]
            knobs[[self._columns[value] for value in own]] = 1.0
            knobs[[self._shared[key] for key, _ in own if key in self._shared]] = 1.0
            counted = work(self._job, self._space.strategies[branch], settings)
            found = self._rows[branch, index] = Row(counted, knobs, values)
        return found

    def promising(
        self, branch: int, best: Mapping[str, Any], fit: Fit, closed: Collection[int]
    ) -> list[int]:
        """Return numbers of settings: the first, the best, the likeliest, and one change of each.

        Each knob has a change before any has its second, those first that may gain most.

        Args:
            branch: position of the branch.
            best: settings of the best so far, of this branch or of another.
            fit: what is known of values.
            closed: numbers of settings with which nothing is left to try.
        """
        if self._space.branches[branch].count <= _MOST_SETTINGS:
            return [n for n in range(self._space.branches[branch].count) if n not in closed]
        knobs, strides = self._knobs[branch], self._space.branches[branch].strides
        at_best, likeliest, hoped = 0, 0, 0
        # What has no effect of its own is counted as none, behind the last value.
        first = len(fit.theta) - self.num_values
        effects = np.append(fit.theta[first:], 0.0)
        variance = np.append(np.diag(fit.covariance)[first:], 0.0)
        values = []  # of each knob: its stride, their effects and what they may reach
        for knob, stride in zip(knobs, strides, strict=True):
            if knob.key in best:
                at_best += stride * knob.digits.get(_text(best[knob.key]), 0)
            effect = effects[knob.columns].sum(axis=1)
            reach = effect - np.sqrt(variance[knob.columns].sum(axis=1))
            likeliest += stride * int(np.argmin(effect))
            hoped += stride * int(np.argmin(reach))
            values.append((stride, effect, reach))

        def changes(start: int) -> Iterator[int]:
            by_knob = []
            for stride, effect, reach in values:
                own = start // stride % len(effect)
                gain = reach - effect[own]
                order = np.argsort(gain, kind="stable").tolist()
                by_knob.append([(gain[n], start + stride * (n - own)) for n in order if n != own])
            for turn in itertools.zip_longest(*by_knob):
                yield from (number for _, number in sorted(each for each in turn if each))

        found: dict[int, None] = {}
        starts = (0, at_best, likeliest, hoped)
        for index in itertools.chain(starts, changes(at_best), changes(likeliest)):
            if len(found) == _MOST_SETTINGS:
                break
            if index not in closed:
                found[index] = None
        return list(found)

    def _knob(self, key: str, values: Sequence[Any]) -> _Knob:
        texts = [_text(value) for value in values]
        own = [self._columns.get((key, text), self.num_values) for text in texts]
        shared = self._shared.get(key, self.num_values)
        both = [[column, shared if column < self.num_values else column] for column in own]
        return _Knob(key, {text: digit for digit, text in enumerate(texts)}, np.array(both))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
