"""Predicted gain of a larger global batch, for users who train one sample per device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsat.memory.forecast import Forecast
from dsat.memory.predictor import Basis
from dsat.run.run import Run
from dsat.run.strategies import make_space
from dsat.search.base import Observation, Problem
from dsat.search.configurations import Configurations
from dsat.search.predictions import Predictions
from dsat.search.threads import one_thread
from dsat.space.deepspeed_settings import SETTING_NAMES
from dsat.space.locate import Point
from dsat.space.plan import Plan
from dsat.values.zero_strategy import of_config

_ENOUGH = 0.98  # a micro batch with this fraction of the largest gain suffices


@dataclass(frozen=True)
class FreeBatch:
    """A larger micro batch with the user's other settings, and its predicted gain as a factor."""

    micro_batch: int
    gain: float


def leaves_nothing_to_trade(plan: Plan) -> bool:
    """Return whether the plan keeps a global batch of one sample per data-parallel group.

    With such a batch, neither a larger micro batch nor less accumulation is possible.
    """
    return (
        plan.train_batch_size is not None and plan.own_batch.micro_batch == 1 == plan.own_batch.gas
    )


@one_thread()
def predict(run: Run) -> FreeBatch | None:
    """Predict the smallest micro batch with nearly the largest gain; None if it is 1 or unknown."""
    own, objective = run.baseline, run.plan.objective
    if run.profile is None or own is None or objective.smaller_is_better or run.value(own) is None:
        return None
    fixed: dict[str, Any] = {"tune": (), "fix": SETTING_NAMES, "choices": {}, "listed_switches": {}}
    plan, profile = replace(run.plan, train_batch_size=None, **fixed), run.profile
    strategy = of_config(plan.base_config)
    space = make_space(plan, replace(profile, switches={}), only=(strategy,))
    basis = run.memory_basis or Basis.of_profile(profile, plan.switches)
    forecast = Forecast(basis, plan, profile, space)
    forecast.learn(own.overrides, own.script_args, run.outcomes[own.id])
    settings = space.branches[0].settings(0)
    most = forecast.largest(settings)
    sizes = [2**power for power in range(1 + int(math.log2(max(1, most))))]
    outcome = run.outcomes[own.id]
    first = Observation(Point(0, 0, 1), space.batch(1, settings), outcome)
    known = Configurations(Problem(profile, objective, space, plan.seed))
    points = known.points([(0, 0)] * len(sizes), np.array(sizes))
    rates = Predictions(known, [first]).log_rate(points)
    gains = np.exp(rates - rates[0])
    at = int(np.argmax(gains >= _ENOUGH * gains.max()))
    return FreeBatch(sizes[at], float(gains[at])) if at else None
