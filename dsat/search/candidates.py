"""Selection of micro batches and settings to compare."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsat.search.feasibility import Values
from dsat.search.normal import Array
from dsat.search.step_time import Job, acts_on_whole_step, work
from dsat.space.overrides import GAS
from dsat.space.space import Branch, Space

_FEW = 24  # up to this number, all micro batches are compared
# Multiples of the predicted largest micro batch, and of the best one, that are compared. Twice as
# many of the former change no replay; with half of the latter, replays end 0.06 points lower
# (replays are explained in `choice`).
_NEAR_THE_EDGE = (1.0, 0.95, 0.87)
_NEAR_THE_BEST = (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25)
_OCTAVES = 2  # below the smallest of these that are compared, so the range follows the best
_TILE = 8  # samples that fill whole tiles of matrix units, whatever the sequence length
MOST_SETTINGS = 12  # compared in a branch; with 24, no replayed search finds anything better
# Prior standard deviations of what the physical model of the log step time misses: effects of a
# strategy, a setting, a script's switch, and whole tiles. Only their ratios count, because their
# scale is learned. Without whole tiles, replays end 0.1 points lower.
_STRATEGY_SD, _SETTING_SD, _SWITCH_SD, _TILES_SD = 0.04, 0.02, 0.2, 0.02
_ALONE_SD = 0.1  # the same, of other trials on the machine
_STRATEGY, _WHOLE_TILES, _ALONE = "strategy", "whole tiles", "alone"  # names of traits


def select_micro_batches(
    micro_batches: Sequence[int], *, edges: Sequence[float], best: Sequence[float]
) -> list[int]:
    """Return the micro batches to compare, ascending: all if they are few.

    Otherwise, they are powers of two and 1.5 times these, from about a quarter of the smallest size
    in `edges` and `best` to twice the largest. Sizes near `edges` and `best` are added, also those
    rounded down to multiples of 8. Each is replaced by the largest allowed micro batch up to it.

    Args:
        edges: largest micro batches predicted to fit.
        best: the best micro batch so far; if empty, sizes from 1 on are compared.
    """
    if len(micro_batches) <= _FEW:
        return list(micro_batches)
    most = max(1.0, 2 * max([*edges, *best]))
    least = max(1.0, min([*edges, *best])) if best else 1.0
    first = max(0, math.floor(math.log2(least)) - _OCTAVES)
    octaves = range(first, math.ceil(math.log2(most)) + 1)
    sizes = [part * 2.0**octave for octave in octaves for part in (1.0, 1.5)]
    near = [part * edge for edge in edges for part in _NEAR_THE_EDGE]
    near += [part * size for size in best for part in _NEAR_THE_BEST]
    sizes += near + [size // _TILE * _TILE for size in near if size > 2 * _TILE]
    ends = {bisect.bisect_right(micro_batches, size) for size in sizes if size <= most} - {0}
    return [micro_batches[end - 1] for end in sorted(ends or {1})]


@dataclass(frozen=True)
class Row:
    """Settings in the form that the models of speed and failures use.

    Attributes:
        work: see `step_time.work`.
        traits: 1 for each value that the settings or the strategy have, else 0; see `Points`.
        values: names of settings and their values, as JSON text.
        gas: accumulation steps if no global batch size decides them.
    """

    work: Array
    traits: Array
    values: Values
    gas: int


class Settings:
    """The settings of all branches, as a `Row` for each combination.

    Attributes:
        effects: prior standard deviation of each trait's effect on a log step time, (traits,).
    """

    def __init__(self, space: Space, job: Job) -> None:
        self._space, self._job = space, job
        self._rows: dict[tuple[int, int], Row] = {}
        self._traits: dict[tuple[str, str], int] = {}
        effects: list[float] = []

        def add(key: str, text: str, sd: float) -> None:
            if (key, text) not in self._traits:
                self._traits[key, text] = len(effects)
                effects.append(sd)

        for strategy in space.strategies:
            add(_STRATEGY, strategy.name, _STRATEGY_SD)
        for is_so in (False, True):
            add(_WHOLE_TILES, str(is_so), _TILES_SD)
            add(_ALONE, str(is_so), _ALONE_SD)
        self._first: dict[str, str] = {}
        for branch in space.branches:
            for key, values in branch.searched:
                texts = [_text(value) for value in values]
                self._first.setdefault(key, texts[0])
                sd = _SWITCH_SD if acts_on_whole_step(key) else _SETTING_SD
                for text in texts if key != GAS else ():
                    add(key, text, sd)
        self.effects = np.array(effects)

    def row(self, branch: int, index: int) -> Row:
        found = self._rows.get((branch, index))
        if found is None:
            found = self._rows[branch, index] = self._make_row(self._space.branches[branch], index)
        return found

    def _make_row(self, branch: Branch, index: int) -> Row:
        strategy, settings = branch.strategy, branch.settings(index)
        values = tuple((key, _text(value)) for key, value in settings.items())
        searched = {key: _text(value) for key, value in branch.values_in(settings).items()}
        having = {**self._first, **dict(values), **searched, _STRATEGY: strategy.name}
        traits = np.zeros(len(self.effects))
        for trait in having.items():
            if trait in self._traits:
                traits[self._traits[trait]] = 1.0
        gas = int(settings.get(GAS, self._space.gas))
        return Row(work(self._job, strategy, settings), traits, values, gas)

    def with_trial(self, traits: Array, micro_batch: Array, is_alone: Any) -> Array:
        """Return traits, (n, traits), with the trial's own added: whole tiles, running alone."""
        found: Array = traits.copy()
        for key, is_so in ((_WHOLE_TILES, micro_batch % _TILE == 0), (_ALONE, is_alone)):
            found[:, self._traits[key, str(True)]] = is_so
            found[:, self._traits[key, str(False)]] = np.logical_not(is_so)
        return found

    def changes(self, branch: int, best: Mapping[str, Any]) -> list[int]:
        """Return the index of the best settings, and of all that differ from them in one value.

        Args:
            best: best settings so far; a value that this branch lacks counts as its first value.
        """
        whole = self._space.branches[branch]
        at_best, others, own = 0, [], whole.values_in(best)
        for (key, values), stride in zip(whole.searched, whole.strides, strict=True):
            digit = values.index(own[key]) if own[key] in values else 0
            at_best += stride * digit
            others += [stride * (other - digit) for other in range(len(values)) if other != digit]
        return [at_best, *(at_best + change for change in others)]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
