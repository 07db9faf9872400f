"""Search by expected improvement, on a physical model of speed and predicted memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from dsat.inputs.option import FRACTION, Option, search_option
from dsat.search.base import NO_NEW_BEST, Outlook, Search
from dsat.search.choice import Choice, Chooser, TooDear
from dsat.search.predictions import Predictions, Problem, Tried
from dsat.search.threads import in_one_thread
from dsat.space.space import Space
from dsat.values.objective import Objective
from dsat.values.outcome import ModelProfile, Outcome
from dsat.values.trial import Proposal


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
        self._problem = Problem(profile, objective, space, self._largest, self._predict is not None)
        self._chooser = Chooser(self._problem, self._costs, self._gated, stop_when)
        self._tried: list[Tried] = []
        self._proposed: dict[int, Proposal] = {}  # what runs, by position in the former
        self._lineage: dict[str, int] = {}  # numbers of settings, as text
        self._latest: Choice | None = None  # of the last decision
        self._is_current = False  # `_latest`, until something changes
        self._is_too_dear = False  # whatever is left to try

    def ask(self) -> Proposal | None:
        choice = self._choice()
        if choice is None:
            return None
        candidates, at = choice.candidates, choice.at
        branch, index = int(candidates.branch[at]), int(candidates.index[at])
        micro_batch = int(candidates.micro_batch[at])
        settings = self._problem.settings.of(branch, index)
        lineage = self._lineage.setdefault(repr((branch, index)), len(self._lineage))
        proposal = Proposal(settings=settings, micro_batch=micro_batch, lineage=lineage)
        neighbours = len(self._proposed)
        for place in self._proposed:
            others = max(self._tried[place].neighbours, neighbours)
            self._tried[place] = replace(self._tried[place], neighbours=others)
        self._proposed[len(self._tried)] = proposal
        self._tried.append(
            replace(self._configuration(branch, settings, micro_batch), neighbours=neighbours)
        )
        self._is_current = False
        return proposal

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        place = next(at for at, each in self._proposed.items() if each == proposal)
        del self._proposed[place]
        self._tried[place] = replace(self._tried[place], outcome=outcome)
        self._is_current = False

    def limit(self, micro_batch: int) -> None:
        super().limit(micro_batch)
        self._is_current = False

    def learn(self, branch: int | None, micro_batch: int, outcome: Outcome) -> None:
        self._is_current = False
        if branch is None:
            return
        settings = self._problem.settings.of(branch, 0)
        self._tried.append(
            replace(self._configuration(branch, settings, micro_batch), outcome=outcome)
        )

    def _configuration(self, branch: int, settings: Mapping[str, Any], micro_batch: int) -> Tried:
        gas = self.space.accumulation(micro_batch, settings)
        return Tried(self.space.strategies[branch], settings, micro_batch, gas)

    @in_one_thread
    def predicted(self, settings: Mapping[str, Any], micro_batch: int) -> float | None:
        like = next((each for each in self._tried if each.settings == settings), None)
        if like is None:
            return None
        known = Predictions.of(self._problem, self._tried)
        gas = self.space.accumulation(micro_batch, settings)
        asked = replace(like, micro_batch=micro_batch, gas=gas, outcome=None)
        points = Predictions.of(self._problem, [asked]).running
        return float(known.log_rate(points)[0])

    @property
    def stop_reason(self) -> str | None:
        if not self._stop_when or all(
            each.outcome is None or not each.outcome.value(self.objective) for each in self._tried
        ):
            return None
        choice = self._choice()
        if choice is None:
            return "further trials take longer than is worth it" if self._is_too_dear else None
        if math.expm1(choice.expected) >= self._stop_when:
            return None
        return f"no further trial is expected to gain more than {100 * self._stop_when:g} %"

    @property
    def outlook(self) -> Outlook | None:
        choice = self._latest
        if choice is None:
            return None
        candidates, at = choice.candidates, choice.at
        only = np.array([at])
        log_rate = self._problem.log_work(candidates.points.only(only))[0] - candidates.log_s[at]
        sign = -1 if self.objective.smaller_is_better else 1
        return Outlook(
            strategy=self.space.strategies[int(candidates.branch[at])].name,
            micro_batch=int(candidates.micro_batch[at]),
            value=math.exp(sign * log_rate),
            chance=choice.chance,
        )

    def _choice(self) -> Choice | None:
        if not self._is_current:
            self._latest, self._is_current = self._choose(), True
        return self._latest

    @in_one_thread
    def _choose(self) -> Choice | None:
        self._is_too_dear = False
        try:
            return self._chooser.choose(self._tried, self._most_samples)
        except TooDear:
            self._is_too_dear = True
            return None
