"""The search of a run: turns trials into observations, and a proposal into the next trial."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dsat.errors import UserInputError
from dsat.memory.forecast import Forecast
from dsat.memory.predictor import Basis
from dsat.run.comparison import Variation
from dsat.run.history import Measured
from dsat.run.run import Run
from dsat.run.trial_costs import TrialCosts
from dsat.run.trial_factory import SEARCHED, make_trial
from dsat.search import SEARCHES
from dsat.search.base import Context, Observation, Problem, Proposal, Stop, Wait
from dsat.search.threads import one_thread
from dsat.space.locate import Locator, Point
from dsat.space.overrides import overrides_for
from dsat.space.plan import Plan
from dsat.space.space import Space
from dsat.values.codec import decode, encode
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind

_OBSERVED = (TrialKind.BASELINE, TrialKind.SEARCH, TrialKind.REPEAT)
_MOST_REPEATED = 1000  # consecutive proposals of known configurations that end a search


class SearchPhase:
    """The search of a run, which decides on the next trial.

    Everything is computed from the run, so a search can continue wherever its journal is read.
    `forecast` is None if memory is not predicted, or if nothing was predicted to fit.
    """

    def __init__(self, plan: Plan, run: Run, space: Space, basis: Basis | None) -> None:
        assert run.profile is not None
        self._plan, self._run, self._space = plan, run, space
        self.forecast = None if basis is None else Forecast(basis, plan, run.profile, space)
        self._costs = TrialCosts(plan, run)
        self._by_digest: dict[str, int] = {}
        self._indexed = 0  # number of trials in `_by_digest`
        self._observations = _Observations(plan, run, space)
        self._learned = 0
        self._update_predictions()
        if self.forecast is not None and not self._anything_fits(self.forecast):
            self.forecast = None  # the predictions are wrong, because the model ran
        problem = Problem(run.profile, plan.objective, space, plan.seed, ramp=plan.ramp)
        self._search = SEARCHES[plan.method](problem, **plan.search_options)
        self._context = Context(self.forecast, self._costs)

    def find_reusable(self, earlier: Iterable[Measured]) -> Iterator[tuple[Trial, Measured]]:
        """Yield new trials for points that earlier runs measured; see `Decisions.find_reusable`."""
        for each in earlier:
            trial, (_, is_exact) = each.trial, self._observations.locate(each.trial)
            if trial.kind is TrialKind.PROFILE or not is_exact:
                continue
            known = self._equal_trial(trial.overrides, trial.script_args)
            if known is None and self._plan.admits(trial.batch):
                made = self._make(trial.overrides, trial.batch, trial.script_args)
                given = ("batch_flag", "accumulation_flag", "flag_leads")
                yield replace(made, **{name: getattr(trial, name) for name in given}), each

    def predicted(self, trial: Trial) -> float | None:
        """Return the search's prediction of a trial's log value; None if it has none."""
        point, _ = self._observations.locate(trial)
        return None if point is None else self._search.predicted(point)

    @one_thread()
    def propose(self) -> Trial | Wait | Stop:
        """Return the next trial, or why there is none."""
        self._update_predictions()
        for _ in range(_MOST_REPEATED):
            answer = self._checked(
                self._search.propose(self._observations.list_all(), self._context)
            )
            if not isinstance(answer, Proposal):
                return answer
            point = answer.point
            settings = self._space.branches[point.branch].settings(point.index)
            trial = self._trial(settings, point.micro_batch, answer)
            if trial is not None:
                return trial
        return Stop(f"the search proposed known configurations {_MOST_REPEATED} times in a row")

    def _checked(self, answer: Any) -> Proposal | Wait | Stop:
        """Check a search's answer; return it as a journal would give it back.

        Raises:
            UserInputError: the answer is invalid.
        """
        try:
            if not isinstance(answer, (Proposal, Wait, Stop)):
                raise ValueError("it is not a Proposal, Wait or Stop")
            plain: Proposal | Wait | Stop = decode(type(answer), encode(answer))
            if isinstance(plain, Proposal):
                self._check_point(plain.point)
        except ValueError as error:
            raise UserInputError(
                f"`{type(self._search).__name__}.propose` returned {answer!r}: {error}",
                where=f"search {self._plan.method!r}",
            ) from None
        return plain

    def _check_point(self, point: Point) -> None:
        """Raise ValueError if a point is outside the space."""
        branches = self._space.branches
        if point.branch not in range(len(branches)):
            raise ValueError("the space has no such branch")
        if point.index not in range(branches[point.branch].count):
            raise ValueError("its branch has no such index")
        if point.micro_batch < 1:
            raise ValueError("its micro batch is less than 1")
        self._space.batch(point.micro_batch, branches[point.branch].settings(point.index))

    def _trial(
        self, settings: Mapping[str, Any], micro_batch: int, proposal: Proposal
    ) -> Trial | None:
        """Return a new trial; if an equal one exists, record it for the search and return None."""
        batch = self._space.batch(micro_batch, settings)
        overrides, script_args = overrides_for(settings, batch), self._space.script_args(settings)
        known = self._equal_trial(overrides, script_args)
        if known is not None:
            self._observations.equal.append((proposal, known))
            return None
        return self._make(overrides, batch, script_args, proposal)

    def _equal_trial(
        self, overrides: Mapping[str, Any], script_args: Mapping[str, Any]
    ) -> int | None:
        """Return the id of an equal baseline or search trial; None if there is none."""
        for trial in list(self._run.trials.values())[self._indexed :]:
            if trial.kind in SEARCHED and not self._run.batch_flag.supersedes(trial):
                digest = self._plan.fingerprint(trial.overrides, trial.script_args)
                self._by_digest.setdefault(digest, trial.id)
        self._indexed = len(self._run.trials)
        return self._by_digest.get(self._plan.fingerprint(overrides, script_args))

    def _make(
        self,
        overrides: Mapping[str, Any],
        batch: BatchTriple,
        script_args: Mapping[str, Any],
        proposal: Proposal | None = None,
    ) -> Trial:
        forecast = self.forecast
        needed = None if forecast is None else forecast.predicted_bytes(overrides, script_args)
        return make_trial(
            self._run,
            TrialKind.SEARCH,
            overrides,
            batch,
            script_args,
            proposal=proposal,
            predicted_bytes=needed,
        )

    def _update_predictions(self) -> None:
        """Correct the predictions by the trials that ended since the last call."""
        ended = list(self._run.outcomes.items())
        for trial_id, outcome in ended[self._learned :]:
            trial = self._run.trials[trial_id]
            if self.forecast is not None:
                self.forecast.learn(trial.overrides, trial.script_args, outcome)
            if trial.kind is not TrialKind.PROFILE:
                self._costs.update(trial, outcome)
        self._learned = len(ended)

    def _anything_fits(self, forecast: Forecast) -> bool:
        smallest = self._space.micro_batches[0]
        settings = (branch.settings(0) for branch in self._space.branches)
        return any(forecast.largest(each) >= smallest for each in settings)


class _Observations:
    """The trials of a run as observations."""

    def __init__(self, plan: Plan, run: Run, space: Space) -> None:
        self._plan, self._run = plan, run
        self._locator = Locator(space)
        self._locations: dict[int, tuple[Point | None, bool]] = {}  # by trial id
        self.equal: list[tuple[Proposal, int]] = []  # proposals, and ids of equal trials

    def list_all(self) -> list[Observation]:
        """Return the trials in the order of their start, then the proposals that equal a trial."""
        run = self._run
        trials = [t for t in run.trials.values() if t.kind in _OBSERVED]
        trials = [trial for trial in trials if not run.batch_flag.supersedes(trial)]
        variation = run.variation
        found = [self._observe(trial, variation) for trial in trials]
        for proposal, trial_id in self.equal:
            observed = self._observe(run.trials[trial_id], variation)
            found.append(
                replace(
                    observed,
                    point=proposal.point,
                    is_exact=True,
                    arm=proposal.arm,
                    note=proposal.note,
                )
            )
        return _blame_micro_batches(found)

    def locate(self, trial: Trial) -> tuple[Point | None, bool]:
        return self._locator.locate(trial.overrides, trial.script_args, trial.batch)

    def _observe(self, trial: Trial, variation: Variation | None) -> Observation:
        if trial.id not in self._locations:
            self._locations[trial.id] = self.locate(trial)
        (point, is_exact), outcome = self._locations[trial.id], self._run.outcomes.get(trial.id)
        if outcome is not None and outcome.metrics is not None and variation is not None:
            # The finals measured the run-to-run variation.
            metrics = outcome.metrics.at_least_as_uncertain(variation.sd)
            outcome = replace(outcome, metrics=metrics)
        is_admitted = self._plan.admits(trial.batch)
        return Observation(
            point,
            trial.batch,
            outcome,
            is_exact=is_exact and is_admitted,
            is_admitted=is_admitted,
            neighbours=0 if outcome is None else self._run.neighbours.get(trial.id, 0),
            arm=trial.lineage,
            note=trial.note,
        )


def _blame_micro_batches(observations: list[Observation]) -> list[Observation]:
    """Mark errors that large micro batches cause, so that searches try smaller ones.

    The micro batch counts as the cause if no micro batch as large ran with any settings, but a
    smaller one ran with the same settings. Errors of other settings with the same message, except
    for numbers, have the same cause. Two such errors limit the micro batches of all settings,
    because a single one may be chance.
    """
    ran = [each for each in observations if each.outcome is not None and each.outcome.ok]
    largest = max((each.batch.micro_batch for each in ran), default=0)
    sound = {(each.point.branch, each.point.index) for each in ran if each.point is not None}
    errors: list[tuple[int, Outcome, str]] = []  # position, outcome, and message without numbers
    counts = Counter[str]()
    causes = set()
    for position, each in enumerate(observations):
        outcome, point = each.outcome, each.point
        if outcome is None or outcome.kind is not OutcomeKind.ERROR or point is None:
            continue
        if each.batch.micro_batch > largest:
            message = re.sub(r"\d+", "", outcome.message)
            errors.append((position, outcome, message))
            counts[message] += 1
            if (point.branch, point.index) in sound:
                causes.add(message)
    marked = list(observations)
    for position, outcome, message in errors:
        if message in causes:
            most = marked[position].batch.micro_batch - 1 if counts[message] > 1 else None
            too_large = replace(outcome, smaller_may_run=True, most_samples=most)
            marked[position] = replace(marked[position], outcome=too_large)
    return marked
