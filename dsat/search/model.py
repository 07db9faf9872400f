"""Expected improvement over what a memory model and a step-time model predict."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsat import speed
from dsat.gaussian import Array, log_cdf, log_expected_gain
from dsat.overrides import GAS
from dsat.search.base import Search
from dsat.search.encoding import Encoding
from dsat.search.feasibility import Feasibility
from dsat.search.lineage import Lineage
from dsat.trial import Outcome, OutcomeKind, Proposal

_WORTHWHILE = math.log(1.01)  # the gain that decides whether to go on
_LEAST_MEASURED = 3  # before that question is asked
_FIRST_LARGEST = 64  # a search begins with at most so many samples, whatever memory allows
_SAFE = math.log(0.8)  # and with a chance like this to fit
_CAUTION = 1.5  # the power of the chance to fit: a trial without memory is worse than a dull one
_SETTINGS = 32  # of a branch, the likeliest best and as many of the most promising
_FEW = 64  # so many micro batches are all compared
_PER_OCTAVE = 8  # of more than that, so many from one power of two to the next
_NEAR_THE_EDGE = (1.0, 0.98, 0.96, 0.94, 0.92, 0.9, 0.87)
_NEAR_THE_BEST = (0.94, 0.97, 1.03, 1.06)
_ACCUMULATIONS = 8  # of the accumulation steps that are listed
_LONG = 10.0  # a step so many times as long as the best one's makes a trial twice as dear


@dataclass(frozen=True)
class _Choice:
    """A configuration: what it promises, and its chance to be better by a worthwhile bit."""

    score: float
    chance: float
    branch: int
    index: int
    position: int


@dataclass(frozen=True)
class _Measured:
    """A configuration that ran, or that runs and is predicted."""

    branch: int
    index: int
    micro_batch: int
    gas: int
    knobs: Array
    log_s: float
    ci95: float


class ModelSearch(Search):
    """Tries what promises most, by models of memory and speed that every outcome corrects.

    Each proposal has the largest expected improvement over the best so far, weighted by its chance
    to run, out of the settings of all branches and of micro batches on a ladder that is fine where
    memory should end. It begins with the defaults of the strategy that promises most: with a micro
    batch that fits safely, then with a quarter of that, which together tell what a sample costs and
    what a micro step costs anyway. What runs counts as measured, with the time that is predicted.

    Args:
        stop_when: end the search when no configuration has a larger chance than this to be 1 %
            better than the best so far; 0 for never.
        early_stopping: end the search after so many trials without a new best.
    """

    def __init__(
        self,
        *args: Any,
        stop_when: float = 0.0,
        early_stopping: int | None = None,
        memory_model: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, memory_model=memory_model, **kwargs)
        self._stop_when = stop_when
        self.patience = early_stopping
        self._encoding = Encoding(self.space)
        count = len(self.space.branches)
        prior = self._encoding.memory_prior(predicted=self._predict is not None)
        self._feasibility = Feasibility(count, memory_model, *prior)
        largest = [2.0 ** self._octave(branch, 0) for branch in range(count)]
        layout = speed.Layout(
            strategies=self.space.strategies,
            slots=self.space.slots,
            reference_micro_batch=min(_FIRST_LARGEST, max(1.0, *largest)),
            knobs=self._encoding.speed_prior(self._rng()),
        )
        self._grid = _Grid(self.space.micro_batches)
        self._keys: list[tuple[int, int]] = []  # branch and number of settings, by lineage
        self._lineage_of: dict[tuple[int, int], Lineage] = {}
        self._asked: list[set[int]] = []  # positions of micro batches, by lineage
        self._running: dict[tuple[int, int], _Measured] = {}  # by lineage and micro batch
        self._measured: list[_Measured] = []
        self._starved: list[tuple[int, int]] = []  # micro batch and gas that wanted more data
        self._first: tuple[Lineage, int] | None = None
        self._second_is_due = True
        self._fit = _fitted(layout, [])
        self._assessed: tuple[_Choice | None] | None = None  # the best choice, running ones aside

    def ask(self) -> Proposal | None:
        found = self._begin() if self._first is None else self._second()
        if found is None:
            choice = self._assess() if not self._running else self._choose_beside_running()
            if choice is None:
                return None
            found = self._open(choice.branch, choice.index), choice.position
        lineage, position = found
        self._first = self._first or found
        self._asked[lineage.id].add(position)
        proposal = self._propose(lineage, position)
        self._running[lineage.id, proposal.micro_batch] = self._predicted(lineage, position)
        return proposal

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        del self._running[proposal.lineage, proposal.micro_batch]
        self._assessed = None
        lineage = self._told(proposal, outcome)
        self._take_in(*self._keys[lineage.id], proposal.micro_batch, outcome)

    def learn(self, branch: int | None, micro_batch: int, outcome: Outcome) -> None:
        self._assessed = None
        if branch is None:
            return
        lineage = self._open(branch, 0)
        position = lineage.position(micro_batch)
        if micro_batch in self.space.micro_batches:
            self._asked[lineage.id].add(position)
            value, shrinks = outcome.value(self.objective), outcome.smaller_may_run
            lineage.record(
                micro_batch, outcome.kind, value, self.objective, smaller_may_run=shrinks
            )
        self._take_in(branch, 0, micro_batch, outcome)

    @property
    def stop_reason(self) -> str | None:
        if not self._stop_when or len(self._measured) < _LEAST_MEASURED:
            return None
        choice = self._assess()
        if choice is None or choice.chance >= self._stop_when:
            return None
        return (
            f"no other configuration has a chance over {100 * self._stop_when:g} % to be 1 % better"
        )

    # -- what was learned

    def _take_in(self, branch: int, index: int, micro_batch: int, outcome: Outcome) -> None:
        knobs = self._encoding.row(branch, index)
        gas = self._gas(branch, index, micro_batch)
        kind = outcome.kind
        short_of_memory = kind in (OutcomeKind.OOM, OutcomeKind.HOST_OOM)
        if outcome.ok or short_of_memory or outcome.smaller_may_run:
            # A want of data bounds the micro batch like one of memory does.
            octave = self._octave(branch, index)
            self._feasibility.learn_memory(branch, knobs, octave, micro_batch, fits=outcome.ok)
        if outcome.smaller_may_run:
            self._starved.append((micro_batch, gas))
        elif kind is not OutcomeKind.CANCELED:
            self._feasibility.learn_soundness(branch, knobs, outcome.ok or short_of_memory)
        value = outcome.value(self.objective)
        if value is not None and 0 < value < math.inf:
            assert outcome.metrics is not None
            log_s = self._work(micro_batch, gas) + self._sign * math.log(value)
            ci95 = 1.96 * outcome.metrics.standard_error
            self._measured.append(_Measured(branch, index, micro_batch, gas, knobs, log_s, ci95))
            # At once: when it is asked for must not matter, since a fit begins with the one before.
            self._fit = _fitted(self._fit.layout, self._measured, self._fit)

    @property
    def _sign(self) -> int:
        return 1 if self.objective.smaller_is_better else -1

    def _work(self, micro_batch: Any, gas: Any) -> Any:
        """What turns the logarithm of a rate into that of a time."""
        return 0.0 if self.objective.smaller_is_better else np.log(micro_batch * gas)

    def _octave(self, branch: int, index: int) -> float:
        """The binary logarithm of the largest micro batch that should fit.

        What fits is a whole number: in the middle between it and the next, the edge.
        """
        settings = self.space.branches[branch].settings(index)
        return math.log2(math.floor(self._largest(branch, settings)) + 0.5)

    def _octaves(self, branch: int, indexes: Array) -> Array:
        return np.array([self._octave(branch, int(index)) for index in indexes])

    def _gas(self, branch: int, index: int, micro_batch: int) -> int:
        settings = self.space.branches[branch].settings(index)
        return self.space.batch(micro_batch, settings).gas

    def _predicted(self, lineage: Lineage, position: int) -> _Measured:
        branch, index = self._keys[lineage.id]
        micro_batch = lineage.micro_batches[position]
        gas = self._gas(branch, index, micro_batch)
        configuration = _Measured(
            branch, index, micro_batch, gas, self._encoding.row(branch, index), 0.0, 0.0
        )
        log_s = float(self._fit.predict(_points([configuration]))[0][0])
        return replace(configuration, log_s=log_s)

    # -- what to try

    def _open(self, branch: int, index: int) -> Lineage:
        """The lineage of a branch's settings number `index`."""
        known = self._lineage_of.get((branch, index))
        if known is not None:
            return known
        micro_batches = self.space.micro_batches
        lineage = Lineage(
            id=len(self._lineages),
            branch=branch,
            settings=self.space.branches[branch].settings(index),
            micro_batches=micro_batches,
            ceiling=micro_batches[-1],
        )
        self._lineages.append(lineage)
        self._lineage_of[branch, index] = lineage
        self._keys.append((branch, index))
        self._asked.append(set())
        return lineage

    def _begin(self) -> tuple[Lineage, int] | None:
        """The defaults that promise most samples a second, with a micro batch that fits safely."""
        best: tuple[float, int, int] | None = None
        sizes = np.array([size for size in self._grid.ladder if size <= _FIRST_LARGEST])
        for branch in range(len(self.space.branches)):
            knobs = np.zeros((1, self._encoding.count))
            octaves = np.array([self._octave(branch, 0)])
            fits = self._feasibility.log_fits(branch, knobs, octaves, sizes)[:, 0]
            safe = sizes[fits >= _SAFE]
            if not len(safe):
                continue
            size = int(safe[-1])
            gas = self._gas(branch, 0, size)
            at = _points([_Measured(branch, 0, size, gas, knobs[0], 0.0, 0.0)])
            promise = math.log(size * gas) - float(self._fit.predict(at)[0][0])
            if best is None or promise > best[0] + 1e-9:
                best = promise, branch, size
        if best is None:
            return None
        lineage = self._open(best[1], 0)
        position = lineage.position(best[2])
        return None if position in self._asked[lineage.id] else (lineage, position)

    def _second(self) -> tuple[Lineage, int] | None:
        """The same settings with a quarter of the samples, unless something like that is known."""
        if not self._second_is_due or self._first is None:
            return None
        self._second_is_due = False
        lineage, position = self._first
        sizes = lineage.micro_batches
        known = [m.micro_batch for m in self._measured if m.branch == lineage.branch]
        if lineage.abandoned or any(2 * size <= sizes[position] for size in known):
            return None
        smaller = bisect.bisect_right(sizes, max(sizes[position] // 4, sizes[0])) - 1
        if smaller in self._asked[lineage.id] or smaller > lineage.open_hi:
            return None
        return lineage, smaller

    def _assess(self) -> _Choice | None:
        """The best choice by what was told; what runs is left out, and not taken into account."""
        if self._assessed is None:
            self._assessed = (self._choose(self._fit, self._measured),)
        return self._assessed[0]

    def _choose_beside_running(self) -> _Choice | None:
        running = list(self._running.values())
        fit = _fitted(self._fit.layout, [*self._measured, *running], self._fit)
        return self._choose(fit, self._measured or running)

    def _choose(self, fit: speed.Fit, known: Sequence[_Measured]) -> _Choice | None:
        """The best of all branches.

        Args:
            known: where the best so far is among.
        """
        best_gain, reference = self._incumbent(fit, known)
        choices = [
            choice
            for branch in range(len(self.space.branches))
            for choice in self._choices(fit, branch, best_gain, reference)
        ]
        if not choices:
            return None
        chosen = max(choices, key=lambda choice: choice.score)
        chance = max(choice.chance for choice in choices)
        return _Choice(chosen.score, chance, chosen.branch, chosen.index, chosen.position)

    def _incumbent(
        self, fit: speed.Fit, known: Sequence[_Measured]
    ) -> tuple[float, _Measured | None]:
        """The best so far by the model, which noise misleads less than a measurement."""
        if not known:
            return 0.0, None
        points = _points(known)
        gains = self._work(points.micro_batch, points.gas) - fit.predict(points)[0]
        best = int(np.argmax(gains))
        return float(gains[best]), known[best]

    def _choices(
        self, fit: speed.Fit, branch: int, best_gain: float, reference: _Measured | None
    ) -> Iterator[_Choice]:
        """The best of a branch for each number of accumulation steps."""
        indexes = self._promising(fit, branch)
        knobs = self._encoding.rows(branch, indexes)
        at = None if reference is None else _points([reference])
        octaves = self._octaves(branch, indexes)
        edges = self._feasibility.expected_largest(branch, knobs, octaves)
        near = [edges[0], edges.max(), *([reference.micro_batch] if reference else [])]
        positions = self._grid.positions(edges=near[:2], best=near[2:])
        sizes = np.array([self.space.micro_batches[p] for p in positions], float)
        if not len(sizes):
            return
        log_sound = self._feasibility.log_sound(branch, knobs)
        for offset in self._accumulations(branch):
            gas = np.array([self._gas(branch, offset, int(size)) for size in sizes])
            if offset:
                octaves = self._octaves(branch, indexes + offset)
            fits = self._feasibility.log_fits(branch, knobs, octaves, sizes)
            is_open = self._is_open(branch, indexes + offset, positions, sizes, gas, fits)
            if not is_open.any():
                continue
            log_s, sd = fit.grid(branch, sizes, gas, knobs, at)
            gain = np.asarray(self._work(sizes, gas)).reshape(-1, 1) - log_s - best_gain
            runs = _CAUTION * fits + log_sound
            if at is None:
                score, chance = gain + runs, 1.0
            else:
                longer = np.exp(log_s - float(fit.predict(at)[0][0]))
                score = log_expected_gain(gain, sd) + runs - np.log1p(longer / _LONG)
                better = log_cdf((gain - _WORTHWHILE) / sd) + fits + log_sound
                chance = math.exp(float(better[is_open].max()))
            score = np.where(is_open, score, -np.inf)
            row, column = divmod(int(np.argmax(score)), len(indexes))
            index = int(indexes[column]) + offset
            yield _Choice(float(score[row, column]), chance, branch, index, positions[row])

    def _is_open(
        self,
        branch: int,
        indexes: Array,
        positions: Sequence[int],
        sizes: Array,
        gas: Array,
        log_fits: Array,
    ) -> Array:
        """Which of (m, s) configurations may be tried; what is known to fit is entered."""
        is_open = np.ones((len(positions), len(indexes)), bool)
        where = np.asarray(positions)
        for micro_batch, steps in self._starved:
            is_open[(sizes >= micro_batch) & (gas >= steps)] = False
        for column, index in enumerate(indexes):
            lineage = self._lineage_of.get((branch, int(index)))
            if lineage is None:
                continue
            log_fits[where < lineage.lo, column] = 0.0
            is_open[where > (-1 if lineage.abandoned else lineage.open_hi), column] = False
            is_open[np.isin(where, list(self._asked[lineage.id])), column] = False
        return is_open

    def _promising(self, fit: speed.Fit, branch: int) -> Array:
        """Numbers of settings: the first, those that should be best and those that might be."""
        tables, space = self._encoding.tables[branch], self.space.branches[branch]
        closed = sum(
            1
            for lineage in self._lineages
            if lineage.branch == branch
            and (lineage.abandoned or len(self._asked[lineage.id]) > lineage.open_hi)
        )
        means, hopes, strides = [], [], []
        for (key, _), table, stride in zip(space.knobs, tables, space.strides, strict=True):
            if key != GAS:
                mean, sd = fit.knob_effects(table)
                means.append(-mean)
                hopes.append(sd - mean)
                strides.append(stride)
        count = _SETTINGS + closed
        found = np.concatenate(
            ([0], _largest_sums(means, strides, count), _largest_sums(hopes, strides, count))
        )
        _, order = np.unique(found, return_index=True)
        return found[np.sort(order)]

    def _accumulations(self, branch: int) -> list[int]:
        """What to add to the number of settings for each number of accumulation steps."""
        space = self.space.branches[branch]
        for (key, values), stride in zip(space.knobs, space.strides, strict=True):
            if key == GAS:
                spread = np.linspace(0, len(values) - 1, min(len(values), _ACCUMULATIONS))
                return [stride * int(digit) for digit in np.unique(spread.round())]
        return [0]


class _Grid:
    """The micro batches that are compared, out of those that are allowed."""

    def __init__(self, micro_batches: Sequence[int]) -> None:
        self._all = micro_batches
        self.ladder: Sequence[int] = micro_batches
        if len(micro_batches) > _FEW:
            octaves = math.ceil(math.log2(micro_batches[-1] + 1))
            sizes = {
                2**octave * (_PER_OCTAVE + part) // _PER_OCTAVE
                for octave in range(octaves)
                for part in range(_PER_OCTAVE)
            }
            at_or_below = {self._position(size) for size in sizes}
            self.ladder = [micro_batches[p] for p in sorted(at_or_below) if p >= 0]

    def positions(self, *, edges: Sequence[float], best: Sequence[float]) -> list[int]:
        """Positions in the allowed micro batches, ascending.

        Args:
            edges: where memory should end; little above is worth a look.
            best: the micro batch of the best so far.
        """
        if len(self._all) <= _FEW:
            return list(range(len(self._all)))
        sizes = [size for size in self.ladder if size <= 4 * max(edges)] or [self._all[0]]
        near = [part * edge for edge in edges for part in _NEAR_THE_EDGE]
        near += [part * size for size in best for part in _NEAR_THE_BEST]
        found = {self._position(size) for size in (*sizes, *near)}
        return sorted(position for position in found if position >= 0)

    def _position(self, size: float) -> int:
        """Of the largest micro batch up to a size; -1 if there is none."""
        return bisect.bisect_right(self._all, size) - 1


def _points(configurations: Sequence[_Measured]) -> speed.Points:
    return speed.Points(
        strategy=np.array([c.branch for c in configurations], int),
        micro_batch=np.array([c.micro_batch for c in configurations], float),
        gas=np.array([c.gas for c in configurations], float),
        knobs=np.array([c.knobs for c in configurations], float),
    )


def _fitted(
    layout: speed.Layout, measured: Sequence[_Measured], start: speed.Fit | None = None
) -> speed.Fit:
    log_s = np.array([m.log_s for m in measured], float)
    ci95 = np.array([m.ci95 for m in measured], float)
    return speed.fit(layout, _points(measured), log_s, ci95, start=start)


def _largest_sums(scores: Sequence[Array], strides: Sequence[int], count: int) -> Array:
    """Numbers of the `count` settings with the largest sums of one score for each knob."""
    totals, indexes = np.zeros(1), np.zeros(1, int)
    for score, stride in zip(scores, strides, strict=True):
        sums = (totals[:, None] + score[None, :]).ravel()
        numbers = (indexes[:, None] + stride * np.arange(len(score))[None, :]).ravel()
        kept = np.argsort(-sums, kind="stable")[:count]
        totals, indexes = sums[kept], numbers[kept]
    return indexes
