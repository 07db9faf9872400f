"""Choice of the next trial: the largest expected gain per second of the trial."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsat.search.base import Costs, Observation
from dsat.search.configurations import TILE, Key
from dsat.search.normal import Array, log_expected_gain
from dsat.search.predictions import Predictions
from dsat.search.speed import Points
from dsat.space.locate import Point

# "Replays" are searches on recorded tables of trials (`benchmarks/replay.py`), with the constant
# changed. Their results are medians of two seeds over all tables, as fractions of the best speed.

# If time is short, a trial precedes the first trials of strategies if its log expected gain exceeds
# theirs and this value. Without this rule, one replay ends at 92.6 % instead of 97.4 %.
_LEAST = math.log(0.01)
# Exponent of the probability to run, because running out of memory is worse than a small gain. With
# 1, replays run out of memory 16 times, not 14, and the worst ends at 96.5 %, not 97.2 %.
_CAUTION = 1.5
# Penalty for a failed first trial of a strategy, which makes all later predictions more cautious.
# Without it, replays end at 99.1 % instead of 99.5 %.
_FAILURE = 0.25
_MOST_UNKNOWN = 0.7  # limit on the sd of a log step time: steps may take half the predicted time
# Usual number of measured trials. At twice this number, a further trial must promise four times the
# gain. Without this rule, searches with 10 % of noise take up to 23 trials and find nothing better;
# with 8, they take up to 16 trials instead of 14 at 3 and 6 % of noise, and find nothing better.
_USUAL_LENGTH = 6
_TIE = 1e-9  # scores that differ by less are equal; the first is chosen
# Attempts at a strategy until one has run. With 1, the worst seeds of replays end at 99.2 % on
# average instead of 99.35 %.
_RETRIES = 3
_FEW = 24  # up to this number, all micro batches are compared
# Compared multiples of the predicted largest micro batch, and of the best one so far. Twice as many
# of the former change no replay; with half of the latter, replays end 0.06 points lower.
_NEAR_THE_EDGE = (1.0, 0.95, 0.87)
_NEAR_THE_BEST = (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25)
_OCTAVES = 2  # compared micro batches begin this many octaves below the smaller of these two
_MOST_SETTINGS = 12  # compared in a branch; with 24, no replayed search finds anything better


def _select_micro_batches(
    micro_batches: Sequence[int], *, edges: Sequence[float], best: Sequence[float]
) -> list[int]:
    """Return the micro batches to compare, ascending: all if they are few.

    Otherwise, they are powers of two and 1.5 times these, from about a quarter of the smallest size
    in `edges` and `best` to twice the largest. Sizes near `edges` and `best` are added, as they are
    and rounded down to multiples of 8. All are rounded down to allowed micro batches.

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
    sizes += near + [size // TILE * TILE for size in near if size > 2 * TILE]
    ends = {bisect.bisect_right(micro_batches, size) for size in sizes if size <= most} - {0}
    return [micro_batches[end - 1] for end in sorted(ends or {1})]


@dataclass(frozen=True)
class Candidates:
    """Configurations to compare, as arrays of equal length n.

    Attributes:
        usual_cost: predicted seconds of a trial of the best configuration so far; infinite if
            unknown.
        branch, index: strategy and settings, as in `Point`.
        log_runs: logarithm of the probability to run.
        gain, sd: predicted log gain over the best so far (log rate if nothing was measured), and
            the standard deviation of the amount by which a trial would change this prediction.
        cost: predicted seconds of a trial; 1 if unknown.
    """

    usual_cost: float
    branch: Array
    index: Array
    micro_batch: Array
    log_runs: Array
    gain: Array
    sd: Array
    cost: Array


@dataclass(frozen=True)
class Chooser:
    """Choice of the next trial from all observations.

    Attributes:
        costs: costs of trials; None if unknown.
        stop_when: as in `ModelSearch`; 0 also allows trials that `Costs.are_unaffordable` excludes.
    """

    known: Predictions
    costs: Costs | None
    stop_when: float

    def choose(self, observations: Sequence[Observation]) -> tuple[Point, float] | None:
        """Return the next configuration; None if there is none left.

        Returns:
            The configuration, and the largest expected log gain of any candidate. The gain is
            reduced for risk, cost and the length of the search. It is infinite while a first trial
            of a strategy is due (`_find_unopened`).

        Raises:
            TooDear: all remaining trials take too long.
        """
        candidates = self._list_candidates()
        if candidates is None:
            return None
        unopened = self._find_unopened(observations)
        first = np.isin(candidates.branch, list(unopened)) & (candidates.index == 0)
        gain = log_expected_gain(candidates.gain, candidates.sd)
        worth = gain + candidates.log_runs
        score = worth + (_CAUTION - 1) * candidates.log_runs - np.log(candidates.cost)
        if not self.known.measured:
            score = candidates.gain + _CAUTION * candidates.log_runs
            if first.any():  # simultaneous first trials use different strategies
                score = np.where(first, score, -np.inf)
        elif first.any() and np.any(better := self._find_preferred(candidates, worth, first)):
            score = np.where(better, worth, -np.inf)
        elif first.any():
            score = candidates.gain - _FAILURE * (1 - np.exp(candidates.log_runs))
            score = np.where(first, score, -np.inf)
        efficiency = worth - np.log(np.maximum(1.0, candidates.cost / candidates.usual_cost))
        expected = float(efficiency.max()) - 2 * math.log(
            max(1.0, self.known.count / _USUAL_LENGTH)
        )
        i = int(np.argmax(score >= score.max() - _TIE))
        place = candidates.branch[i], candidates.index[i], candidates.micro_batch[i]
        return Point(*map(int, place)), math.inf if first.any() else math.exp(expected)

    def _find_unopened(self, observations: Sequence[Observation]) -> set[int]:
        """Return branches without offloading that never ran but have attempts left (`_RETRIES`)."""
        attempts, ran = Counter[int](), set()
        for observation in observations:
            if observation.point is None:
                continue
            attempts[observation.point.branch] += 1
            if observation.outcome is None or observation.outcome.ok:
                ran.add(observation.point.branch)
        return {
            branch
            for branch, strategy in enumerate(self.known.configurations.problem.space.strategies)
            if branch not in ran and not strategy.offloads and attempts[branch] < _RETRIES
        }

    def _find_preferred(self, candidates: Candidates, worth: Array, first: Array) -> Array:
        """Return a mask of the candidates that promise more than all due first trials, (n,).

        Candidates for which time will still be left after these first trials do not count.
        """
        if self.costs is None:
            return np.zeros(len(worth), bool)
        branch, cost = candidates.branch, candidates.cost
        firsts_s = sum(cost[first & (branch == b)].max() for b in set(branch[first]))
        better: Array = worth > max(_LEAST, float(worth[first].max()))
        better &= cost + firsts_s > self.costs.left_s
        return better

    def _list_candidates(self) -> Candidates | None:
        predictions, configurations = self.known, self.known.configurations
        keys, sizes = self._list_open()
        if not keys:
            return None
        points = configurations.points(keys, sizes)
        speed = (
            predictions.speed.beside(predictions.running)
            if len(predictions.running)
            else predictions.speed
        )
        best = predictions.incumbent
        if best is None:
            log_s, sd = speed.predict(points)
        else:  # the best so far comes last
            joined = Points.join([points, best[0]])
            log_s, sd = speed.predict(joined, reference=len(points))
        new = slice(len(points))
        gain = configurations.log_work(points) - log_s[new] - (0.0 if best is None else best[1])
        cost = np.ones(len(points))
        step_s = predictions.seconds(log_s)
        eligible, usual_cost = np.ones(len(points), bool), math.inf
        if self.costs is not None and step_s is not None:
            cost = self.costs.trial_s(step_s)
            usual_cost, cost = float(cost[-1]), cost[new]
            least_s = (step_s * np.exp(-np.minimum(sd, _MOST_UNKNOWN)))[new]
            eligible = ~self.costs.are_too_long(least_s)
            if self.stop_when:
                eligible &= ~self.costs.are_unaffordable(least_s)
        if not eligible.any():
            raise TooDear
        # How much a measurement, as noisy as earlier ones, would change each prediction: little if
        # the prediction is more certain. This is the standard deviation of the knowledge gradient
        # (Frazier, Powell and Dayanik, SIAM J. Control Optim. 47 (2008)).
        moved = (sd**2 / np.hypot(sd, speed.noise))[new]
        branch, index = np.array(keys).T
        log_runs = predictions.log_runs(keys, points)
        arrays = (branch, index, sizes, log_runs, gain, moved, cost)
        return Candidates(usual_cost, *(array[eligible] for array in arrays))

    def _list_open(self) -> tuple[list[Key], Array]:
        """Return the settings and the micro batches of the configurations that may be tried."""
        predictions, configurations = self.known, self.known.configurations
        micro_batches = configurations.problem.space.micro_batches
        keys: list[Key] = []
        open_sizes: list[Array] = []
        for branch in range(len(configurations.problem.space.branches)):
            compared = self._list_settings(branch)
            if not compared:
                continue
            edges = [configurations.edge(key) for key in compared]
            ends = [edges[0], max(edges)]
            sizes = np.array(
                _select_micro_batches(micro_batches, edges=ends, best=predictions.best_sizes)
            )
            for key in compared:
                open_sizes.append(sizes[predictions.find_open(key, sizes)])
                keys += [key] * len(open_sizes[-1])
        return keys, np.concatenate([np.zeros(0), *open_sizes])

    def _list_settings(self, branch: int) -> list[Key]:
        """Return the settings of a branch to compare, without those that past trials exclude.

        These are all settings if they are few (`_MOST_SETTINGS`). Else, they are the first and the
        best settings, and the most promising changes of one value of the best.
        """
        predictions, configurations = self.known, self.known.configurations
        count = configurations.problem.space.branches[branch].count
        if count <= _MOST_SETTINGS:
            keys = [(branch, index) for index in range(count)]
        else:
            best = predictions.best_settings(branch)
            changes = configurations.changes(branch, best)
            size = np.full(len(changes), max(predictions.best_sizes, default=1.0))
            points = configurations.points(changes, size)
            mean, sd = predictions.speed.predict(points, reference=0)
            hopes = np.round(mean - sd, 9)  # ties are broken by position
            order = np.argsort(hopes[1:], kind="stable") + 1
            keys = list(dict.fromkeys([(branch, 0), changes[0], *(changes[i] for i in order)]))
        return [key for key in keys if not predictions.is_closed(key)][:_MOST_SETTINGS]


class TooDear(Exception):
    """All remaining trials take too long."""
