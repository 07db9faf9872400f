"""Search by expected improvement, on a physical model of speed and predicted memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from dsat.options import FRACTION, Option, search_option
from dsat.search.base import (
    EXHAUSTED,
    NO_NEW_BEST,
    Context,
    Decision,
    Observation,
    Problem,
    Proposal,
    Search,
    Stop,
    Wait,
    stop_without_new_best,
)
from dsat.search.choice import Chooser, TooDear
from dsat.search.configurations import Configurations
from dsat.search.predictions import Predictions
from dsat.space.locate import Point


class ModelSearch(Search):
    """Search for the largest expected gain per second; its models are fitted to all trials.

    It begins with the first settings of each strategy without offloading, at the micro batch with
    the best predicted speed and chance to fit. Later proposals maximise the expected gain over the
    best so far, times the probability to run, per second of the trial. Running trials count as if
    they had been measured as predicted.

    Args:
        stop_when: end the search if every further trial takes too long or is expected to gain less
            than this fraction; 0 for never. Before that, every strategy without offloading must
            have run, or failed three times.
        early_stopping: end the search after this number of trials without a new best.
    """

    needs_time = True
    summary = (
        "the default: predicts speed and memory of all configurations and tries the most promising"
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
        self._stop_when = stop_when
        self._patience = early_stopping
        self._configurations = Configurations(problem)
        self._predictions: Predictions | None = None  # fitted at the last decision

    def propose(self, observations: Sequence[Observation], context: Context) -> Decision:
        stop = stop_without_new_best(self._patience, observations, self.problem.objective)
        if stop is not None:
            return stop
        self._configurations.set_memory(context.memory)
        self._predictions = predictions = Predictions(self._configurations, observations)
        may_stop = self._stop_when > 0 and len(predictions.measured) > 0
        is_running = any(o.outcome is None for o in observations)
        try:
            choice = Chooser(predictions, context.costs, self._stop_when).choose(observations)
        except TooDear:
            if may_stop:
                return Stop("further trials would take too long for their expected gain")
            choice = None
        if choice is None:
            return Wait() if is_running else Stop(EXHAUSTED)
        point, expected = choice
        if may_stop and math.expm1(expected) < self._stop_when:
            gain = f"{100 * self._stop_when:g} %"
            return Stop(f"no further trial is expected to gain more than {gain}")
        return Proposal(point)

    def predicted(self, point: Point) -> float | None:
        if self._predictions is None:
            return None
        key, size = (point.branch, point.index), np.array([point.micro_batch])
        points = self._predictions.configurations.points([key], size)
        return float(self._predictions.log_rate(points)[0])
