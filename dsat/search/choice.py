"""Choice of the next trial: the largest expected gain for each second that it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from dsat.search.base import Costs, Observation, Source
from dsat.search.candidates import select_positions
from dsat.search.normal import Array, log_expected_gain
from dsat.search.predictions import Configurations, Predictions
from dsat.search.speed import Points
from dsat.space.locate import Point

# "Replays" are runs of `benchmarks/replay.py` with the constant changed: medians of two seeds over
# all tables, as fractions of the best.
# Gain, as a logarithm, for which first trials of strategies wait where time is short. If they never
# do, one replay ends at 92.6 % and not at 97.4 %.
_LEAST = math.log(0.01)
# Power of the chance to fit: running out of memory is worse than a small gain. With 1, replays run
# out of memory 16 times and not 14, and the worst ends at 96.5 % and not at 97.2 %.
_CAUTION = 1.5
# Penalty of a failed first trial of a strategy, after which predictions leave more room everywhere.
# Without it, replays end at 99.1 % and not at 99.5 %.
_FAILURE = 0.25
_MOST_UNKNOWN = 0.7  # of the logarithm of a step: a trial may take half of what is predicted
# Trials that a search measures; one twice as long demands four times the gain of each further
# trial. Without this, searches with 10 % of noise take up to 23 trials and find nothing better;
# with 8, up to 16 at 3 and 6 % of noise in place of 14, and find nothing better either.
_USUAL_LENGTH = 6
_TIE = 1e-9  # scores that differ by less are equal; the first is chosen
# Trials of a strategy until one has run. With 1, the worst seeds of replays end at 99.2 % in the
# mean, and not at 99.35 %.
_RETRIES = 3


@dataclass(frozen=True)
class Candidates:
    """Configurations to compare, as arrays of one length n.

    Attributes:
        branch, index: positions of their settings.
        log_runs: logarithm of the probability to run.
        gain, sd: predicted logarithm of the gain over the best so far, and how much a trial will
            change it.
        cost: cost of a trial, in seconds if they are known.
        usual_cost: cost of a trial of the best so far.
    """

    points: Points
    branch: Array
    index: Array
    log_runs: Array
    gain: Array
    sd: Array
    cost: Array
    usual_cost: float

    def only(self, kept: Array) -> Candidates:
        others = [f.name for f in fields(self) if f.name not in ("points", "usual_cost")]
        arrays = {name: getattr(self, name)[kept] for name in others}
        return replace(self, points=self.points.only(kept), **arrays)


@dataclass(frozen=True)
class Choice:
    """The next configuration.

    Attributes:
        expected: largest expected gain of any candidate, as a logarithm; infinite while some
            strategy is not measured.
    """

    point: Point
    expected: float


@dataclass(frozen=True)
class Chooser:
    """Choice of the next trial from all observations.

    Attributes:
        costs: costs of trials; None if unknown.
        stop_when: as in `ModelSearch`; 0 keeps trials that cost more than a verdict may.
    """

    configurations: Configurations
    costs: Costs | None
    stop_when: float

    def choose(self, known: Predictions, observations: Sequence[Observation]) -> Choice | None:
        """Return the next configuration; None if there is none left.

        Raises:
            TooDear: whatever is left takes too long.
        """
        candidates = self.list_candidates(known)
        if candidates is None:
            return None
        unopened = self._find_unopened(observations)
        first = np.isin(candidates.branch, list(unopened)) & (candidates.index == 0)
        gain = log_expected_gain(candidates.gain, candidates.sd)
        worth = gain + candidates.log_runs
        score = worth + (_CAUTION - 1) * candidates.log_runs - np.log(candidates.cost)
        if not known.measured:
            score = candidates.gain + _CAUTION * candidates.log_runs
            if first.any():  # several at once are of different strategies
                score = np.where(first, score, -np.inf)
        elif first.any() and np.any(better := self._find_urgent(candidates, worth, first)):
            score = np.where(better, worth, -np.inf)
        elif first.any():
            score = candidates.gain - _FAILURE * (1 - np.exp(candidates.log_runs))
            score = np.where(first, score, -np.inf)
        for_its_time = worth - np.log(np.maximum(1.0, candidates.cost / candidates.usual_cost))
        expected = float(for_its_time.max()) - 2 * math.log(
            max(1.0, len(known.measured) / _USUAL_LENGTH)
        )
        at = int(np.argmax(score >= score.max() - _TIE))
        place = candidates.branch[at], candidates.index[at], candidates.points.micro_batch[at]
        return Choice(Point(*map(int, place)), math.inf if first.any() else math.exp(expected))

    def _find_unopened(self, observations: Sequence[Observation]) -> set[int]:
        """Return branches without offloading that have not run, after few attempts."""
        found = set()
        for branch, strategy in enumerate(self.configurations.problem.space.strategies):
            own = [
                each.outcome
                for each in observations
                if each.point and each.point.branch == branch and each.source is not Source.FINAL
            ]
            ran = any(outcome is None or outcome.ok for outcome in own)
            if strategy.burden - (strategy.stage == 3) <= 0 and not ran and len(own) < _RETRIES:
                found.add(branch)
        return found

    def _find_urgent(self, candidates: Candidates, worth: Array, first: Array) -> Array:
        """Return candidates that promise more than first trials, but are too dear after them."""
        if self.costs is None:
            return np.zeros(len(worth), bool)
        branch, cost = candidates.branch, candidates.cost
        firsts_s = sum(cost[first & (branch == each)].max() for each in set(branch[first]))
        better: Array = worth > max(_LEAST, float(worth[first].max()))
        better &= cost + firsts_s > self.costs.left_s
        return better

    def list_candidates(self, known: Predictions) -> Candidates | None:
        branches = range(len(self.configurations.problem.space.branches))
        parts = [self._compare_branch(branch, known) for branch in branches]
        found = [part for part in parts if part is not None]
        if not found:
            return None
        points = Points.join([part[0] for part in found])
        branch, index, log_runs = (np.concatenate([part[n] for part in found]) for n in (1, 2, 3))
        speed = known.speed.beside(known.running) if len(known.running) else known.speed
        best = known.incumbent
        log_s, sd = speed.predict(points, None if best is None else best[0])
        gain = self.configurations.log_work(points) - log_s - (0.0 if best is None else best[1])
        cost = np.ones(len(points))
        step_s = known.seconds(log_s)
        kept, usual_cost = np.ones(len(points), bool), math.inf
        if self.costs is not None and step_s is not None:
            cost = self.costs.trial_s(step_s)
            if best is not None:
                usual_s = known.seconds(speed.predict(best[0])[0])
                usual_cost = float(self.costs.trial_s(usual_s)[0])
            least_s = step_s * np.exp(-np.minimum(sd, _MOST_UNKNOWN))
            kept = ~self.costs.are_too_long(least_s)
            if self.stop_when:
                kept &= ~self.costs.are_unaffordable(least_s)
        if not kept.any():
            raise TooDear
        # A measurement is as uncertain as those before it, so it teaches little about what is
        # known better than that (the knowledge gradient's standard deviation: Frazier, Powell and
        # Dayanik, SIAM J. Control Optim. 47 (2008)).
        moved = sd**2 / np.hypot(sd, speed.noise)
        arrays = (branch, index, log_runs, gain, moved, cost)
        return Candidates(points, *arrays, usual_cost).only(kept)

    def _compare_branch(
        self, branch: int, known: Predictions
    ) -> tuple[Points, Array, Array, Array] | None:
        """Return the configurations of a branch that may be tried, and their chances to run.

        Returns:
            The configurations, the numbers of their branch and of their settings, and the
            logarithms of their chances; None if there is none.
        """
        configurations, settings = self.configurations, self.configurations.settings
        space, is_gated = configurations.problem.space, configurations.memory is not None
        sizes = space.micro_batches
        best = known.incumbent
        near = [] if best is None else [float(best[0].micro_batch[0])]

        def predict(numbers: Sequence[int]) -> tuple[Array, Array]:
            size = np.full(len(numbers), near[0] if near else 1.0)
            points = self._points(branch, numbers, np.arange(len(numbers)), size)
            return known.speed.predict(points, points.only(np.array([0])))

        closed = {
            number
            for (own, number), history in known.histories.items()
            if own == branch and not history.admits_any(sizes)
        }
        indexes = settings.promising(branch, known.best_settings(branch), predict, closed)
        if not indexes:
            return None
        edges = [configurations.edge(branch, number) for number in indexes]
        ends = [edges[0], max(edges)]
        positions = select_positions(sizes, edges=ends, best=near)
        size_at = np.array([sizes[position] for position in positions])
        is_open = np.empty((len(indexes), len(positions)), bool)
        for row, number in enumerate(indexes):
            is_open[row] = size_at <= (edges[row] if is_gated else math.inf)
            history = known.histories.get((branch, number))
            if history is not None:
                is_open[row] &= [history.admits(size) for size in size_at.tolist()]
            gas = space.accumulation(size_at, settings.of(branch, number))
            for size, steps in known.lacking:
                is_open[row] &= ~((size_at >= size) & (gas >= steps))
        if not is_open.any():
            return None
        rows, columns = np.nonzero(is_open)
        points = self._points(branch, indexes, rows, size_at[columns], edges)
        fits = np.log(known.runs.fits(branch, configurations.octaves(points)))
        sound = np.log([known.runs.runs(settings.row(branch, n).values) for n in indexes])
        for row, number in enumerate(indexes):
            history = known.histories.get((branch, number))
            if history is not None:
                fits[(rows == row) & (points.micro_batch < history.ran)] = 0.0
        numbers = np.array(indexes)[rows]
        return points, np.full(len(points), branch), numbers, fits + sound[rows]

    def _points(
        self,
        branch: int,
        numbers: Sequence[int],
        where: Any,
        micro_batch: Array,
        edges: Sequence[float] | None = None,
    ) -> Points:
        """Return n configurations of a branch; see `Configurations.points`."""
        known, settings = self.configurations, self.configurations.settings
        if edges is None:
            edges = [known.edge(branch, number) for number in numbers]
        gas, space = np.ones(len(where)), known.problem.space
        for position, number in enumerate(numbers):
            here = where == position
            gas[here] = space.accumulation(micro_batch[here], settings.of(branch, number))
        rows = [settings.row(branch, number) for number in numbers]
        return known.points(rows, where, micro_batch, gas, edges)


class TooDear(Exception):
    """Whatever is left to try takes too long."""
