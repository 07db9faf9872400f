"""Search by expected improvement, on a physical model of speed and predicted memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dsat.inputs.option import FRACTION, Option, search_option
from dsat.search.arm import Arm
from dsat.search.arms import Arms
from dsat.search.base import (
    EXHAUSTED,
    NO_NEW_BEST,
    Context,
    Costs,
    Memory,
    Observation,
    Outlook,
    Problem,
    Proposal,
    Search,
    Source,
    Stop,
    Wait,
    largest_micro_batch,
    stop_without_new_best,
)
from dsat.search.candidates import compared_positions
from dsat.search.normal import Array, log_cdf, log_expected_gain
from dsat.search.predictions import Predictions
from dsat.search.speed import Points, SpeedModel
from dsat.space.locate import Point

_WORTHWHILE = math.log(1.01)  # the gain whose chance people are told
_LEAST = math.log(0.01)  # of a gain, for which the first trial of another strategy waits
_CAUTION = 1.5  # power of the chance to fit: a trial without memory is worse than a dull one
# Of a first trial: gains that justify the double cost, and that it fails, after which predictions
# leave more room everywhere.
_DOUBLING, _FAILURE = 0.01, 0.25
_UNLIKELY = math.log(0.5)  # that it runs
_MOST_UNKNOWN = 0.7  # of the logarithm of a step that is judged too long
_RETRIES = 3  # smaller micro batches for the first trial of a strategy
_LONG = 10.0  # a step so many times as long as the best one's doubles the cost of a trial


@dataclass(frozen=True)
class _Candidates:
    """Configurations to compare, as arrays of one length n.

    Attributes:
        points: as the model of speed takes them.
        index: numbers of their settings in their branches.
        position: of their micro batches in the allowed ones.
        log_s: predicted logarithm of the seconds of a step.
        gain: predicted logarithm of the gain over the best so far.
        sd: standard deviation of that.
        runs: logarithm of the chance to run.
        cost: of a trial, in seconds where they are known.
    """

    points: Points
    index: Array
    position: Array
    log_s: Array
    gain: Array
    sd: Array
    runs: Array
    cost: Array


@dataclass(frozen=True)
class _Choice:
    """The next configuration.

    Attributes:
        at: its position in `candidates`.
        expected: largest expected gain of any candidate, as a logarithm; infinite while a strategy
            was not measured.
        chance: largest chance of any candidate of a worthwhile gain.
    """

    candidates: _Candidates
    at: int
    expected: float
    chance: float


class ModelSearch(Search):
    """Try the most promising configuration, by models that every outcome corrects.

    It begins with the first settings of each strategy, at about the largest micro batch that is
    predicted to fit: larger ones are not worth it where the model says that they only cost time.
    Each further proposal has the largest expected gain over the best so far, weighted by its chance
    to run, for each second that it takes. What runs counts as measured, with its predicted time.

    Args:
        stop_when: end the search when every strategy without offloading was measured and no trial
            is expected to gain more than this, as a fraction; 0 for never.
        early_stopping: end the search after so many trials without a new best.
    """

    summary = (
        "the usual choice: predicts speed and memory of everything, and tries the most promising"
    )
    options: ClassVar[Mapping[str, Option]] = {
        "stop_when": search_option(
            "--stop-when",
            "end the search when no further trial is expected to gain more than GAIN; 0 for never",
            kind=FRACTION,
            default="0.3%",
            metavar="GAIN",
        ),
        "early_stopping": NO_NEW_BEST,
    }

    def __init__(
        self, problem: Problem, *, stop_when: float = 0.0, early_stopping: int | None = None
    ) -> None:
        super().__init__(problem)
        self.space, self.objective = problem.space, problem.objective
        self._stop_when = stop_when
        self._patience = early_stopping
        self._memory: Memory | None = None
        self._costs: Costs | None = None
        self._learned: set[int] = set()  # positions of the observations that the models know
        self._known: Predictions | None = None
        self._running: list[Points] = []
        self._starved: list[tuple[int, int]] = []  # micro batches and gas that lacked data
        self._observations: Sequence[Observation] = ()
        self._is_too_dear = False  # whatever is left to try
        self._latest: _Choice | None = None  # of the last decision

    def propose(
        self, observations: Sequence[Observation], context: Context
    ) -> Proposal | Wait | Stop:
        self._memory, self._costs = context.memory, context.costs
        self._latest = None
        stop = stop_without_new_best(self._patience, observations, self.objective)
        if stop is not None or not self.space.micro_batches:
            return stop or Stop(EXHAUSTED)
        self._observe(observations, context)
        self._latest = choice = self._choose()
        has_measured = self.speed.measured is not None
        if choice is None:
            if self._is_too_dear and self._stop_when and has_measured:
                return Stop("further trials take longer than is worth it")
            is_running = any(each.outcome is None for each in observations)
            return Wait() if is_running else Stop(EXHAUSTED)
        if self._stop_when and has_measured and math.expm1(choice.expected) < self._stop_when:
            gain = f"{100 * self._stop_when:g} %"
            return Stop(f"no further trial is expected to gain more than {gain}")
        candidates, at = choice.candidates, choice.at
        branch, index = int(candidates.points.strategy[at]), int(candidates.index[at])
        arm = self._arms.arm(branch, index)
        if arm.number is None:
            self._arms.begin(arm)
        micro_batch = self.space.micro_batches[int(candidates.position[at])]
        return Proposal(Point(branch, index, micro_batch), arm.number)

    @property
    def _predictions(self) -> Predictions:
        if self._known is None:
            problem = self.problem
            self._known = Predictions(
                problem.profile,
                problem.objective,
                problem.space,
                self._largest,
                predicted=self._memory is not None,
            )
        return self._known

    @property
    def speed(self) -> SpeedModel:
        return self._predictions.speed

    def _largest(self, settings: Mapping[str, Any]) -> float:
        return largest_micro_batch(self.problem, self._memory, settings)

    def predicted(self, point: Point) -> float | None:
        first, size = np.array([0]), np.array([point.micro_batch])
        points = self._predictions.points(point.branch, [point.index], first, size)
        return float(self._predictions.log_rate(points)[0])

    @property
    def outlook(self) -> Outlook | None:
        choice = self._latest
        if choice is None:
            return None
        points, at = choice.candidates.points, choice.at
        log_rate = self._predictions.log_work(points)[at] - choice.candidates.log_s[at]
        sign = -1 if self.objective.smaller_is_better else 1
        return Outlook(
            strategy=self.space.strategies[int(points.strategy[at])].name,
            micro_batch=int(points.micro_batch[at]),
            value=math.exp(sign * log_rate),
            chance=choice.chance,
        )

    # -- what is known

    def _observe(self, observations: Sequence[Observation], context: Context) -> None:
        """Update the models with what has ended since the last decision."""
        self._observations = observations
        self._arms = Arms(self.problem, observations, context, is_bounded=False)
        self._running, self._starved = [], []
        for position, each in enumerate(observations):
            point, outcome = each.point, each.outcome
            if point is None:
                continue
            if outcome is None:
                size = np.array([point.micro_batch])
                points = self._predictions.points(point.branch, [point.index], np.array([0]), size)
                self._running.append(points)
                continue
            if outcome.smaller_may_run:
                self._starved.append((point.micro_batch, each.batch.gas))
            if outcome.most_samples is not None:
                self._starved.append((outcome.most_samples + 1, 1))
            if position not in self._learned and each.source is not Source.FINAL:
                self._learned.add(position)
                self._predictions.update(
                    point.branch, point.index, point.micro_batch, outcome, each.batch.gas
                )

    # -- what to try

    def _unopened(self) -> set[int]:
        """Strategies without offloading whose first trial is to come, or failed for its size."""
        found = set()
        ran = {branch for branch, _ in self._predictions.measured}
        mine = [each for each in self._observations if each.point and each.source is Source.SEARCH]
        for branch, strategy in enumerate(self.space.strategies):
            own = [each for each in mine if each.point and each.point.branch == branch]
            if strategy.burden - (strategy.stage == 3) or any(o.outcome is None for o in own):
                continue
            if branch not in ran and len(own) < _RETRIES:
                found.add(branch)
        return found

    def _choose(self) -> _Choice | None:
        candidates = self._candidates()
        if candidates is None:
            return None
        opened = ~np.isin(candidates.points.strategy, list(self._unopened()))
        first = ~opened & (candidates.index == 0) & (candidates.runs > _UNLIKELY)
        gain = log_expected_gain(candidates.gain, candidates.sd)
        worth = gain + candidates.runs
        if self.speed.measured is None:
            score = candidates.gain + _CAUTION * candidates.runs
            if first.any():  # several at once are of different strategies
                score = np.where(first, score, -np.inf)
        elif first.any() and np.any(better := opened & self._cannot_wait(candidates, worth, first)):
            score = np.where(better, worth, -np.inf)
        elif first.any():
            score = candidates.gain - _FAILURE * (1 - np.exp(candidates.runs))
            score = np.where(first, score - _DOUBLING * np.log2(candidates.cost), -np.inf)
        else:
            score = worth + (_CAUTION - 1) * candidates.runs - np.log(candidates.cost)
        chance = log_cdf((candidates.gain - _WORTHWHILE) / candidates.sd) + candidates.runs
        return _Choice(
            candidates,
            int(np.argmax(score)),
            expected=math.inf if first.any() else math.exp(float(worth.max())),
            chance=math.exp(float(chance.max())),
        )

    def _cannot_wait(self, candidates: _Candidates, worth: Array, first: Array) -> Array:
        """Return which gain surely more than first trials, whose cost would leave too little."""
        if self._costs is None:
            return np.zeros(len(worth), bool)
        strategy, cost = candidates.points.strategy, candidates.cost
        firsts_s = sum(cost[first & (strategy == branch)].max() for branch in set(strategy[first]))
        gains: Array = worth > max(_LEAST, float(worth[first].max()))
        too_dear: Array = gains & (cost + firsts_s > self._costs.left_s)
        return too_dear

    def _candidates(self) -> _Candidates | None:
        """All configurations to compare that may be tried."""
        running = self._running
        reference, best_rate = self._predictions.incumbent(running)
        parts = [self._of_branch(b, reference) for b in range(len(self.space.branches))]
        found = [part for part in parts if part is not None]
        if not found:
            return None
        points = Points.of([part[0] for part in found])
        index, position, runs = (np.concatenate([part[n] for part in found]) for n in (1, 2, 3))
        fit = self.speed.fit if not running else self.speed.fit.beside(Points.of(running))
        log_s, sd = fit.predict(points, reference)
        cost = 1 + np.exp(log_s - log_s.min()) / _LONG
        kept = np.ones(len(points), bool)
        step_s = self._predictions.seconds(log_s)
        if self._costs is not None and step_s is not None:
            cost = self._costs.trial_s(step_s)
            least_s = step_s * np.exp(-np.minimum(sd, _MOST_UNKNOWN))
            kept = ~self._costs.are_too_long(least_s)
            if self._stop_when:
                kept &= ~self._costs.are_unaffordable(least_s)
        self._is_too_dear = not kept.any()
        if self._is_too_dear:
            return None
        gain = self._predictions.log_work(points) - log_s - best_rate
        sd = self._predictions.learnable(fit, sd)
        arrays = (index, position, log_s, gain, sd, runs, cost)
        return _Candidates(points.only(kept), *(array[kept] for array in arrays))

    def _of_branch(
        self, branch: int, reference: Points | None
    ) -> tuple[Points, Array, Array, Array] | None:
        """Configurations of a branch that may be tried, and their chances to run.

        Returns:
            The configurations, the numbers of their settings, the positions of their micro batches
            and the logarithms of their chances; None if there is none.
        """
        predictions, sizes = self._predictions, self.space.micro_batches
        known = {arm.index: arm for arm in self._arms.all if arm.branch == branch}
        closed = {number for number, arm in known.items() if _is_closed(arm)}
        best = predictions.best_settings(branch)
        indexes = predictions.settings.promising(branch, best, self.speed.fit, closed)
        if not indexes:
            return None
        edges = [predictions.edge(branch, number) for number in indexes]
        near = [] if reference is None else [float(reference.micro_batch[0])]
        most = self._arms.memory_limit(branch)
        ends = [min(most, edge) for edge in (edges[0], max(edges))]
        positions = np.array(compared_positions(sizes, edges=ends, best=near))
        size_at = np.array([sizes[position] for position in positions.tolist()])
        is_open = np.empty((len(indexes), len(positions)), bool)
        for row, number in enumerate(indexes):
            is_open[row] = size_at <= min(most, edges[row] if self._memory else math.inf)
            arm = known.get(number)
            if arm is not None:
                is_open[row] &= positions <= arm.open_hi
                is_open[row] &= [at not in arm.tried for at in positions.tolist()]
            if self._starved:
                is_open[row] &= ~self._lacks_data(branch, number, size_at)
        if not is_open.any():
            return None
        rows, columns = np.nonzero(is_open)
        micro_batches = size_at[columns]
        points = predictions.points(branch, indexes, rows, micro_batches, edges)
        fits, sound = predictions.log_runs(branch, points, indexes, rows)
        for row, number in enumerate(indexes):
            arm = known.get(number)
            if arm is not None and arm.lo:
                fits[(rows == row) & (micro_batches < sizes[arm.lo - 1])] = 0.0
        return points, np.array(indexes)[rows], positions[columns], fits + sound

    def _lacks_data(self, branch: int, index: int, micro_batches: Array) -> Array:
        """Return for which micro batches of some settings there were too few data, (n,)."""
        settings = self._predictions.settings.of(branch, index)
        gas = self.space.accumulation(micro_batches, settings)
        lacking = [(micro_batches >= size) & (gas >= steps) for size, steps in self._starved]
        found: Array = np.any(lacking, axis=0)
        return found


def _is_closed(arm: Arm) -> bool:
    """Return whether every micro batch of an arm was tried, or is too large."""
    return arm.abandoned or sum(at <= arm.open_hi for at in arm.tried) > arm.open_hi
