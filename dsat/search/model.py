"""Expected improvement over what a physical model of speed and a prediction of memory say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dsat.inputs.option import FRACTION, Option, search_option
from dsat.search.base import NO_NEW_BEST, Outlook, Search
from dsat.search.candidates import MicroBatches, Settings
from dsat.search.feasibility import Feasibility
from dsat.search.lineage import Lineage
from dsat.search.normal import Array, log_cdf, log_expected_gain
from dsat.search.speed import Fit, Layout, Points, SpeedModel
from dsat.search.step_time import Job
from dsat.search.threads import in_one_thread
from dsat.space.space import Space
from dsat.values.objective import Objective
from dsat.values.outcome import ModelProfile, Outcome
from dsat.values.trial import Proposal

_WORTHWHILE = math.log(1.01)  # the gain whose chance people are told
_CAUTION = 1.5  # power of the chance to fit: a trial without memory is worse than a dull one
# Of a strategy's first trial: gains that justify the double cost, and that it fails.
_DOUBLING, _FAILURE = 0.01, 0.15
_UNLIKELY = math.log(0.5)  # that it runs
_MOST_UNKNOWN = 0.7  # of the logarithm of a step that is judged too long
_RETRIES = 3  # smaller micro batches for the first trial of a strategy
_TILES_SD = 0.01  # of a micro batch that never ran: whole tiles and waves of matrix products
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
    """Tries what promises most, by models of memory and speed that every outcome corrects.

    It begins with the first settings of each strategy, at about the largest micro batch that is
    predicted to fit: larger ones are not worth it where the model says that they only cost time.
    Each further proposal has the largest expected gain over the best so far, weighted by its chance
    to run, for each second that it takes. What runs counts as measured, with its predicted time.

    Args:
        stop_when: end the search when every strategy without offloading was measured and no trial
            is expected to gain more than this, as a fraction; 0 for never.
        early_stopping: end the search after so many trials without a new best.
    """

    summary = "tries next what models of memory and speed expect most of; every trial corrects them"
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
    weighs_costs = True

    def __init__(
        self,
        profile: ModelProfile,
        objective: Objective,
        space: Space,
        *,
        stop_when: float = 0.0,
        early_stopping: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(profile, objective, space, **kwargs)
        self._stop_when = stop_when
        self.patience = early_stopping
        job = Job.of_profile(profile, slots=space.slots, slots_per_host=space.slots_per_host)
        self._settings = Settings(space, job)
        self.speed = SpeedModel(Layout(job, space.strategies, self._settings.num_values))
        self._feasibility = Feasibility(
            len(space.branches),
            predicted=self._predict is not None,
            on_device=profile.host_memory_bytes > 0,
        )
        self._sizes = MicroBatches(space.micro_batches)
        # Of the memory, what a sample takes.
        self._sample_part = profile.activation_bytes_per_sample / profile.slot_memory_bytes
        self._log_units: list[float] = []  # what makes seconds of the model's unit, by outcome
        self._measured: list[tuple[int, int]] = []  # branch and settings of `speed.points`
        self._keys: list[tuple[int, int]] = []  # the same by lineage
        self._lineage_of: dict[tuple[int, int], Lineage] = {}
        self._asked: list[set[int]] = []  # positions of micro batches, by lineage
        self._running: dict[tuple[int, int], Points] = {}  # by lineage and micro batch
        self._openings = [0] * len(space.branches)  # first trials of each strategy
        self._starved: list[tuple[int, int]] = []  # micro batches and gas that lacked data
        self._is_too_dear = False  # whatever is left to try
        self._next: tuple[_Choice | None] | None = None  # while nothing changes

    def ask(self) -> Proposal | None:
        choice = self._choice()
        if choice is None:
            return None
        candidates, at = choice.candidates, choice.at
        branch = int(candidates.points.strategy[at])
        lineage = self._open(branch, int(candidates.index[at]))
        position = int(candidates.position[at])
        self._asked[lineage.id].add(position)
        self._openings[branch] += branch in self._unopened()
        proposal = self._propose(lineage, position)
        self._running[lineage.id, proposal.micro_batch] = candidates.points.only(np.array([at]))
        self._next = None
        return proposal

    @in_one_thread
    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        del self._running[proposal.lineage, proposal.micro_batch]
        lineage = self._told(proposal, outcome)
        self._update(lineage, proposal.micro_batch, outcome)

    def limit(self, micro_batch: int) -> None:
        self._next = None
        self._starved.append((micro_batch + 1, 1))

    @in_one_thread
    def learn(self, branch: int | None, micro_batch: int, outcome: Outcome) -> None:
        self._next = None
        if branch is None:
            return
        lineage = self._open(branch, 0)
        if micro_batch in self.space.micro_batches:
            self._asked[lineage.id].add(lineage.position(micro_batch))
            self._note_memory(branch, micro_batch, outcome)
            lineage.record(
                micro_batch,
                outcome.kind,
                outcome.value(self.objective),
                self.objective,
                smaller_may_run=outcome.smaller_may_run,
            )
        self._update(lineage, micro_batch, outcome)

    @property
    def stop_reason(self) -> str | None:
        if not self._stop_when or not self.speed.points:
            return None
        choice = self._choice()
        if choice is None:
            return "further trials take longer than is worth it" if self._is_too_dear else None
        if math.expm1(choice.expected) >= self._stop_when:
            return None
        return f"no further trial is expected to gain more than {100 * self._stop_when:g} %"

    @property
    def outlook(self) -> Outlook | None:
        choice = None if self._next is None else self._next[0]
        if choice is None:
            return None
        points, at = choice.candidates.points, choice.at
        log_rate = self._log_work(points)[at] - choice.candidates.log_s[at]
        sign = -1 if self.objective.smaller_is_better else 1
        return Outlook(
            strategy=self.space.strategies[int(points.strategy[at])].name,
            micro_batch=int(points.micro_batch[at]),
            value=math.exp(sign * log_rate),
            chance=choice.chance,
        )

    # -- what is known

    def _update(self, lineage: Lineage, micro_batch: int, outcome: Outcome) -> None:
        """Update the models with the outcome of a trial."""
        self._next = None
        branch, index = self._keys[lineage.id]
        points = self._points(branch, [(index, micro_batch)])
        octaves = math.log2(micro_batch) - math.log2(self._edge(lineage.settings))
        self._feasibility.update(branch, lineage.settings, octaves, outcome)
        if outcome.smaller_may_run:
            self._starved.append((micro_batch, int(points.gas[0])))
            if outcome.most_samples is not None:
                self._starved.append((outcome.most_samples + 1, 1))
        value = outcome.value(self.objective)
        if value is None or not 0 < value < math.inf:
            return
        assert outcome.metrics is not None
        sign = 1 if self.objective.smaller_is_better else -1
        log_s = float(self._log_work(points)[0]) + sign * math.log(value)
        self.speed.update(points, log_s, outcome.metrics.standard_error)
        self._log_units.append(math.log(outcome.metrics.latency / 1000) - log_s)
        self._measured.append((branch, index))

    def _points(self, branch: int, which: list[tuple[int, int]]) -> Points:
        """Configurations of a branch by the numbers of settings and micro batches."""
        rows = [self._settings.row(branch, index) for index, _ in which]
        edges = {index: self._edge(self._settings.of(branch, index)) for index, _ in which}
        return Points(
            strategy=np.full(len(which), branch),
            work=np.array([row.work for row in rows]),
            knobs=np.array([row.knobs for row in rows]),
            micro_batch=np.array([size for _, size in which], float),
            gas=np.array([self._gas(branch, index, size) for index, size in which], float),
            room=np.array([(edges[i] - size) * self._sample_part for i, size in which]),
        )

    def _edge(self, settings: Mapping[str, Any]) -> float:
        """The largest micro batch that should fit; in the middle between it and the next."""
        return math.floor(self._largest(settings)) + 0.5

    def _gas(self, branch: int, index: int, micro_batch: int) -> int:
        return self.space.batch(micro_batch, self._settings.of(branch, index)).gas

    def _log_work(self, points: Points) -> Array:
        """Return the offset between the logarithms of a rate and a time, (n,)."""
        work: Array = np.log(points.micro_batch * points.gas)
        return np.zeros(len(work)) if self.objective.smaller_is_better else work

    def _open(self, branch: int, index: int) -> Lineage:
        """The lineage of a branch's settings number `index`."""
        known = self._lineage_of.get((branch, index))
        if known is not None:
            return known
        lineage = Lineage(
            id=len(self._lineages),
            branch=branch,
            settings=self._settings.of(branch, index),
            micro_batches=self.space.micro_batches,
            ceiling=self.space.micro_batches[-1],
        )
        self._lineages.append(lineage)
        self._lineage_of[branch, index] = lineage
        self._keys.append((branch, index))
        self._asked.append(set())
        return lineage

    # -- what to try

    def _unopened(self) -> set[int]:
        """Strategies without offloading whose first trial is to come, or failed for its size."""
        found = set()
        ran = {branch for branch, _ in self._measured}
        running = {self._keys[lineage][0] for lineage, _ in self._running}
        for branch, strategy in enumerate(self.space.strategies):
            tries = self._openings[branch]
            if strategy.burden - (strategy.stage == 3) or branch in running:
                continue
            if tries == 0 or (branch not in ran and tries < _RETRIES):
                found.add(branch)
        return found

    def _choice(self) -> _Choice | None:
        if self._next is None:
            self._next = (self._choose(),)
        return self._next[0]

    @in_one_thread
    def _choose(self) -> _Choice | None:
        candidates = self._candidates()
        if candidates is None:
            return None
        first = np.isin(candidates.points.strategy, list(self._unopened()))
        first &= (candidates.index == 0) & (candidates.runs > _UNLIKELY)
        gain = log_expected_gain(candidates.gain, candidates.sd)
        worth = gain + candidates.runs
        if not self.speed.points:
            score = candidates.gain + _CAUTION * candidates.runs
        elif first.any():
            score = candidates.gain - _FAILURE * (1 - np.exp(candidates.runs))
            score = score - _DOUBLING * np.log2(candidates.cost)
            score = np.where(first, score, -np.inf)
        else:
            score = worth + (_CAUTION - 1) * candidates.runs - np.log(candidates.cost)
        better = log_cdf((candidates.gain - _WORTHWHILE) / candidates.sd) + candidates.runs
        return _Choice(
            candidates,
            int(np.argmax(score)),
            expected=math.inf if first.any() else math.exp(float(worth.max())),
            chance=math.exp(float(better.max())),
        )

    def _candidates(self) -> _Candidates | None:
        """All configurations to compare that may be tried."""
        reference, best_rate = self._incumbent()
        parts, indexes, positions, runs = [], [], [], []
        for branch in range(len(self.space.branches)):
            which = self._open_ones(branch, reference)
            if not which:
                continue
            sizes = self.space.micro_batches
            points = self._points(branch, [(index, sizes[at]) for index, at in which])
            index = np.array([index for index, _ in which])
            edges = points.room / self._sample_part + points.micro_batch
            octaves = np.log2(points.micro_batch) - np.log2(np.maximum(edges, 0.5))
            fits = np.log(self._feasibility.fits(branch, octaves))
            for number in np.unique(index):
                lineage = self._lineage_of.get((branch, int(number)))
                if lineage is not None and lineage.lo:
                    fits[(index == number) & (points.micro_batch < sizes[0] + lineage.lo)] = 0.0
            sound = {i: self._feasibility.runs(self._settings.of(branch, i)) for i in set(index)}
            runs.append(fits + np.log([sound[i] for i in index]))
            parts.append(points)
            indexes.append(index)
            positions.append(np.array([at for _, at in which]))
        if not parts:
            return None
        points, index = Points.of(parts), np.concatenate(indexes)
        fit = self.speed.fit
        if self._running:
            fit = fit.beside(Points.of(list(self._running.values())))
        log_s, sd = fit.predict(points, reference)
        step_s = np.exp(log_s + (float(np.median(self._log_units)) if self._log_units else 0.0))
        found = _Candidates(
            points,
            index,
            np.concatenate(positions),
            log_s,
            self._log_work(points) - log_s - best_rate,
            self._learnable(fit, sd, points),
            np.concatenate(runs),
            self._cost(log_s, step_s),
        )
        kept = np.arange(len(points))
        if self._costs is not None and self._log_units:
            least_s = step_s * np.exp(-np.minimum(sd, _MOST_UNKNOWN))
            too_long = self._costs.are_too_long(least_s)
            if self._stop_when:
                too_long = too_long | self._costs.are_unaffordable(least_s)
            kept = kept[~too_long]
        self._is_too_dear = not len(kept)
        if self._is_too_dear:
            return None
        return _Candidates(
            points.only(kept),
            *(getattr(found, name)[kept] for name in list(_Candidates.__dataclass_fields__)[1:]),
        )

    def _learnable(self, fit: Fit, sd: Array, points: Points) -> Array:
        """By how much a trial will move the prediction of its configuration, (n,).

        A measurement is as uncertain as those before it, so it tells little of what is known better
        than that (the knowledge gradient's standard deviation: Frazier, Powell and Dayanik, SIAM J.
        Control Optim. 47 (2008)).
        """
        sizes = [int(known.micro_batch[0]) for known in self.speed.points]
        tiles = np.where(np.isin(points.micro_batch, sizes), 0.0, _TILES_SD)
        variance = sd**2 + fit.misfit**2 + tiles**2
        noise = fit.noise**2
        moved: Array = variance / np.sqrt(variance + noise)
        return moved

    def _incumbent(self) -> tuple[Points | None, float]:
        """The best by the model, which noise misleads less, and the logarithm of its rate."""
        known = self.speed.points or list(self._running.values())
        if not known:
            return None, 0.0
        points = Points.of(known)
        rates: Array = self._log_work(points) - self.speed.fit.predict(points)[0]
        best = int(np.argmax(rates))
        return points.only(np.array([best])), float(rates[best])

    def _cost(self, log_s: Array, step_s: Array) -> Array:
        """Return the cost of trials in seconds, or in relative units before any measurement."""
        if self._costs is None or not self._log_units:
            relative: Array = 1 + np.exp(log_s - log_s.min()) / _LONG
            return relative
        cost: Array = self._costs.trial_s(step_s)
        return cost

    def _open_ones(self, branch: int, reference: Points | None) -> list[tuple[int, int]]:
        """Settings and positions of micro batches of a branch that may be tried."""
        best = self._best_of(branch)
        indexes = self._settings.promising(branch, best, self.speed.fit)
        edges = {index: self._edge(self._settings.of(branch, index)) for index in indexes}
        near = [] if reference is None else [float(reference.micro_batch[0])]
        positions = self._sizes.positions(edges=(edges[0], max(edges.values())), best=near)
        limit = self._oom_limit(branch)
        sizes = self.space.micro_batches
        found = []
        for index in indexes:
            lineage = self._lineage_of.get((branch, index))
            asked = set() if lineage is None else self._asked[lineage.id]
            top = math.inf if lineage is None else (-1 if lineage.abandoned else lineage.open_hi)
            for at in positions:
                size = sizes[at]
                if at in asked or at > top or size > limit:
                    continue
                if self._gated and size > edges[index]:
                    continue
                if self._starved and self._lacks_data(size, self._gas(branch, index, size)):
                    continue
                found.append((index, at))
        return found

    def _lacks_data(self, micro_batch: int, gas: int) -> bool:
        return any(micro_batch >= size and gas >= steps for size, steps in self._starved)

    def _best_of(self, branch: int) -> Mapping[str, Any]:
        """The settings of the best that was measured in a branch, or else in any."""
        own = [n for n, (b, _) in enumerate(self._measured) if b == branch]
        among = own or list(range(len(self._measured)))
        if not among:
            return {}
        points = Points.of([self.speed.points[n] for n in among])
        rates = self._log_work(points) - np.array([self.speed.log_s[n] for n in among])
        return self._settings.of(*self._measured[among[int(np.argmax(rates))]])
