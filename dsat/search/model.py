"""Expected improvement over what a memory model and a step-time model predict."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from dsat.inputs.option import FRACTION, Option, search_option
from dsat.search import next_minutes, step_time
from dsat.search.base import NO_NEW_BEST, Outlook, Search
from dsat.search.candidates import MicroBatches, largest_sums
from dsat.search.lineage import Lineage
from dsat.search.next_minutes import Looked
from dsat.search.normal import MOST_DRAWS, Array, log_cdf, log_expected_gain
from dsat.search.surrogate import Configuration, Surrogate, points_of
from dsat.search.threads import in_one_thread
from dsat.space.overrides import GAS
from dsat.values.outcome import Outcome
from dsat.values.trial import Proposal

_WORTHWHILE = math.log(1.01)  # the gain whose chance people are told
NEXT_S = 180.0  # what a search may gain in its next three minutes decides whether to go on
_KNOWN_ENOUGH = 3  # micro batches that were measured before the search begins
_LEAST_MEASURED = 3  # before that question is asked
_SAFE = math.log(0.8)  # and with a chance like this to fit
_CAUTION = 1.5  # the power of the chance to fit: a trial without memory is worse than a dull one
_SETTINGS = 32  # of a branch, the likeliest best and as many of the most promising
_ACCUMULATIONS = 8  # of the accumulation steps that are listed
_DRY = math.log(4.0)  # per trial that ran out of memory with the smallest micro batch of a branch
_LONG = 10.0  # a step so many times as long as the best one's makes a trial twice as dear


@dataclass(frozen=True)
class _Choice:
    """The best candidate of a branch.

    Attributes:
        score: expected improvement, weighted by its chance to run and its cost; a logarithm.
        chance: the best chance of all candidates of a worthwhile improvement.
        looked: what was looked at, as far as there is anything to compare it with.
    """

    score: float
    chance: float
    looked: Sequence[Looked]
    branch: int
    index: int
    position: int


class ModelSearch(Search):
    """Tries what promises most, by models of memory and speed that every outcome corrects.

    Each proposal has the largest expected improvement over the best so far, weighted by its chance
    to run, out of the settings of all branches and of micro batches on a ladder that is fine where
    memory should end. It begins with the defaults of the strategy that promises most: with a micro
    batch that fits safely, then with a quarter of that, which together tell what a sample costs and
    what a micro step costs anyway. What runs counts as measured, with the time that is predicted.

    Args:
        stop_when: end the search when its next three minutes are expected to gain less than this,
            as a fraction, and every strategy that should fit without offloading was measured, since
            a machine's links may surprise the model; 0 for never. See `next_minutes`.
        early_stopping: end the search after so many trials without a new best.

    Attributes:
        surrogate: the model of step time and memory.
    """

    summary = "tries next what models of memory and speed expect most of; every trial corrects them"
    options: ClassVar[Mapping[str, Option]] = {
        "stop_when": search_option(
            "--stop-when",
            "end the search when three more minutes of it are expected to gain less than GAIN; "
            "0 for never",
            kind=FRACTION,
            default="2%",
            metavar="GAIN",
        ),
        "early_stopping": NO_NEW_BEST,
    }
    ramps = True
    first_largest: ClassVar[int] = 64
    weighs_costs = True

    def __init__(
        self,
        *args: Any,
        stop_when: float = 0.0,
        early_stopping: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._stop_when = stop_when
        self.patience = early_stopping
        self.surrogate = Surrogate(
            self.space,
            self.objective,
            self._largest,
            predicted=self._predict is not None,
            begin_with=self.first_largest,
            rng=self._rng(),
        )
        self._sizes = MicroBatches(self.space.micro_batches)
        self._keys: list[tuple[int, int]] = []  # branch and number of settings, by lineage
        self._lineage_of: dict[tuple[int, int], Lineage] = {}
        self._asked: list[set[int]] = []  # positions of micro batches, by lineage
        self._running: dict[tuple[int, int], Configuration] = {}  # by lineage and micro batch
        self._first: tuple[Lineage, int] | None = None
        self._second_is_due = True
        self._assessed: tuple[_Choice | None] | None = None  # the best choice, running ones aside

    @in_one_thread
    def ask(self) -> Proposal | None:
        known = self._first is None and len(self.surrogate.measured) >= _KNOWN_ENOUGH
        if known:  # from a ramp: what a sample and a micro step cost
            self._second_is_due, found = False, None
        else:
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
        self._running[lineage.id, proposal.micro_batch] = self.surrogate.configuration(
            *self._keys[lineage.id], proposal.micro_batch
        )
        return proposal

    @in_one_thread
    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        del self._running[proposal.lineage, proposal.micro_batch]
        self._assessed = None
        lineage = self._told(proposal, outcome)
        self.surrogate.update(*self._keys[lineage.id], proposal.micro_batch, outcome)

    def limit(self, micro_batch: int) -> None:
        self._assessed = None
        self.surrogate.starved.append((micro_batch + 1, 1))

    @in_one_thread
    def learn(self, branch: int | None, micro_batch: int, outcome: Outcome) -> None:
        self._assessed = None
        if branch is None:
            return
        lineage = self._open(branch, 0)
        position = lineage.position(micro_batch)
        if micro_batch in self.space.micro_batches:
            self._asked[lineage.id].add(position)
            self._note_memory(branch, micro_batch, outcome)
            value, shrinks = outcome.value(self.objective), outcome.smaller_may_run
            lineage.record(
                micro_batch, outcome.kind, value, self.objective, smaller_may_run=shrinks
            )
        self.surrogate.update(branch, 0, micro_batch, outcome)

    @property
    @in_one_thread
    def stop_reason(self) -> str | None:
        if not self._stop_when or len(self.surrogate.measured) < _LEAST_MEASURED:
            return None
        choice = self._assess()
        if choice is None or choice.branch in self._unknown_branches():
            return None
        fit = self.surrogate.fit
        reference = self.surrogate.incumbent(fit, self.surrogate.measured)[1]
        assert reference is not None
        if not self._gains_little(fit, choice.looked, reference):
            return None
        return (
            f"{NEXT_S / 60:g} more minutes are expected to gain less than "
            f"{100 * self._stop_when:g} %"
        )

    @property
    @in_one_thread
    def outlook(self) -> Outlook | None:
        choice = None if self._assessed is None else self._assessed[0]
        if choice is None:
            return None
        micro_batch = self.space.micro_batches[choice.position]
        expected = self.surrogate.configuration(choice.branch, choice.index, micro_batch)
        log_rate = self.surrogate.log_work(micro_batch, expected.gas) - expected.log_s
        sign = -1 if self.objective.smaller_is_better else 1
        return Outlook(
            strategy=self.space.strategies[choice.branch].name,
            micro_batch=micro_batch,
            value=math.exp(sign * log_rate),
            chance=choice.chance,
        )

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
        surrogate, best = self.surrogate, None
        sizes = np.array([size for size in self._sizes.ladder if size <= self.first_largest])
        for branch in range(len(self.space.branches)):
            knobs = surrogate.encoding.rows(branch, np.zeros(1, int))
            edges = surrogate.log2_largest(branch, [0])
            fits = surrogate.feasibility.log_fits(branch, knobs, edges, sizes)[:, 0]
            safe = sizes[fits >= _SAFE]
            if not len(safe):
                continue
            candidates = (surrogate.configuration(branch, 0, int(size)) for size in safe[::-1])
            candidate = next((c for c in candidates if not self._takes_too_long(c)), None)
            if candidate is None:
                continue
            size = candidate.micro_batch
            promise = math.log(size * candidate.gas) - candidate.log_s
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
        known = [m.micro_batch for m in self.surrogate.measured if m.branch == lineage.branch]
        if lineage.abandoned or any(2 * size <= sizes[position] for size in known):
            return None
        smaller = bisect.bisect_right(sizes, max(sizes[position] // 4, sizes[0])) - 1
        if smaller in self._asked[lineage.id] or smaller > lineage.open_hi:
            return None
        return lineage, smaller

    def _assess(self) -> _Choice | None:
        """The best choice by what was told; what runs is left out, and not taken into account."""
        if self._assessed is None:
            self._assessed = (self._choose(self.surrogate.fit, self.surrogate.measured),)
        return self._assessed[0]

    def _choose_beside_running(self) -> _Choice | None:
        running = list(self._running.values())
        fit = self.surrogate.fit.beside(points_of(running))
        return self._choose(fit, self.surrogate.measured or running)

    def _choose(self, fit: step_time.Fit, known: Sequence[Configuration]) -> _Choice | None:
        """Return the best choice of all branches.

        Args:
            fit: the model of time.
            known: where the best so far is among.
        """
        best_gain, reference = self.surrogate.incumbent(fit, known)
        at = None if reference is None else fit.reference(points_of([reference]))
        choices = [
            choice
            for branch in range(len(self.space.branches))
            for choice in self._choices(fit, branch, best_gain, at)
        ]
        if not choices:
            return None
        looked = [looked for choice in choices for looked in choice.looked]
        unknown = self._unknown_branches()
        instead = [choice for choice in choices if choice.branch in unknown]
        if instead and reference is not None and self._gains_little(fit, looked, reference):
            choices = instead
        chosen = max(choices, key=lambda choice: choice.score)
        return replace(chosen, chance=max(choice.chance for choice in choices), looked=looked)

    def _gains_little(
        self, fit: step_time.Fit, looked: Sequence[Looked], reference: Configuration
    ) -> bool:
        """Return whether the next minutes are expected to gain too little to go on."""
        if not self._stop_when or len(self.surrogate.measured) < _LEAST_MEASURED:
            return False
        worth = next_minutes.worth(looked, fit, points_of([reference]))
        return math.expm1(worth) < self._stop_when

    def _unknown_branches(self) -> set[int]:
        """Strategies without offloading of which nothing has run, nor run out of memory."""
        seen = {ran.branch for ran in (*self.surrogate.measured, *self._running.values())}
        return {
            branch
            for branch, strategy in enumerate(self.space.strategies)
            if (strategy.offload_optimizer, strategy.offload_param) == ("none", "none")
            and branch not in seen
            and not self._oom_history[branch].failures
        }

    def _choices(
        self, fit: step_time.Fit, branch: int, best_gain: float, at: step_time.Reference | None
    ) -> Iterator[_Choice]:
        """The best of a branch for each number of accumulation steps; `at` is the best so far."""
        surrogate, indexes = self.surrogate, self._promising(fit, branch)
        knobs = surrogate.encoding.rows(branch, indexes)
        edges = surrogate.log2_largest(branch, indexes)
        largest = surrogate.feasibility.expected_largest(branch, knobs, edges)
        positions = self._sizes.positions(
            edges=(float(largest[0]), float(largest.max())),
            best=() if at is None else at.points.micro_batch,
        )
        sizes = np.array([self.space.micro_batches[p] for p in positions], float)
        if not len(sizes):
            return
        log_sound = surrogate.feasibility.log_sound(branch, knobs)
        for offset in self._accumulations(branch):
            gas = np.array([surrogate.gas(branch, offset, int(size)) for size in sizes])
            if offset:
                edges = surrogate.log2_largest(branch, indexes + offset)
            fits = surrogate.feasibility.log_fits(branch, knobs, edges, sizes)
            is_open = self._is_open(branch, indexes + offset, positions, sizes, gas, fits)
            if self._gated:
                is_open &= np.log2(sizes)[:, None] <= edges[None, :]
            below_oom = sizes <= self._oom_limit(branch)
            is_open &= below_oom[:, None]
            log_s, sd = fit.grid(branch, sizes, gas, knobs, at)
            if self._costs is not None and surrogate.measured:
                seen_s = gas * self._costs.micro_step_s(self.space.strategies[branch].name, sizes)
                step_s = np.maximum(np.exp(log_s + surrogate.log_unit), seen_s[:, None])
                is_open &= ~self._costs.are_too_long(step_s)
            if not is_open.any():
                continue
            gain = np.asarray(surrogate.log_work(sizes, gas)).reshape(-1, 1) - log_s - best_gain
            runs = _CAUTION * fits + log_sound - _DRY * self._oom_history[branch].failures
            if at is None:
                score, chance, looked = gain + runs, 1.0, []
            else:
                expected = log_expected_gain(gain, sd)
                cost = self._cost(log_s, at.log_s)
                score = expected + runs - np.log(cost)
                better = log_cdf((gain - _WORTHWHILE) / sd) + fits + log_sound
                chance = math.exp(float(better[is_open].max()))
                trials = np.ones_like(gain)
                if self._knows_costs:
                    trials = np.minimum(MOST_DRAWS, NEXT_S / cost)
                sound = np.where(is_open, np.exp(fits + log_sound), 0.0)
                looked = [Looked(branch, sizes, gas, knobs, gain, sd, sound, trials)]
            score = np.where(is_open, score, -np.inf)
            row, column = divmod(int(np.argmax(score)), len(indexes))
            index = int(indexes[column]) + offset
            best = float(score[row, column])
            yield _Choice(best, chance, looked, branch, index, positions[row])

    def _takes_too_long(self, configuration: Configuration) -> bool:
        if self._costs is None or not self.surrogate.measured:
            return False
        step_s = math.exp(configuration.log_s + self.surrogate.log_unit)
        return bool(self._costs.are_too_long(step_s))

    @property
    def _knows_costs(self) -> bool:
        return self._costs is not None and bool(self.surrogate.measured)

    def _cost(self, log_s: Array, best_log_s: float) -> Array:
        """Return the cost of trials in seconds, or in relative units before any measurement."""
        if self._costs is None or not self.surrogate.measured:
            return 1 + np.exp(log_s - best_log_s) / _LONG
        cost: Array = self._costs.trial_s(np.exp(log_s + self.surrogate.log_unit))
        return cost

    def _is_open(
        self,
        branch: int,
        indexes: Array,
        positions: Sequence[int],
        sizes: Array,
        gas: Array,
        log_fits: Array,
    ) -> Array:
        """Return which of (m, s) configurations may be tried; mark those known to fit."""
        is_open = np.ones((len(positions), len(indexes)), bool)
        where = np.asarray(positions)
        row_of = {position: row for row, position in enumerate(positions)}
        for micro_batch, steps in self.surrogate.starved:
            is_open[(sizes >= micro_batch) & (gas >= steps)] = False
        for column, index in enumerate(indexes):
            lineage = self._lineage_of.get((branch, int(index)))
            if lineage is None:
                continue
            log_fits[where < lineage.lo, column] = 0.0
            is_open[where > (-1 if lineage.abandoned else lineage.open_hi), column] = False
            asked = [row_of[at] for at in self._asked[lineage.id] if at in row_of]
            is_open[asked, column] = False
        return is_open

    def _promising(self, fit: step_time.Fit, branch: int) -> Array:
        """Numbers of settings: the first, those that should be best and those that might be."""
        tables, space = self.surrogate.encoding.tables[branch], self.space.branches[branch]
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
            ([0], largest_sums(means, strides, count), largest_sums(hopes, strides, count))
        )
        _, order = np.unique(found, return_index=True)
        return found[np.sort(order)]

    def _accumulations(self, branch: int) -> list[int]:
        """Return the offset of settings for each number of accumulation steps."""
        space = self.space.branches[branch]
        for (key, values), stride in zip(space.knobs, space.strides, strict=True):
            if key == GAS:
                spread = np.linspace(0, len(values) - 1, min(len(values), _ACCUMULATIONS))
                return [stride * int(digit) for digit in np.unique(spread.round())]
        return [0]
