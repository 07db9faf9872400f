"""Hyperparameters that vary between trials, declared for the plots of the web UI.

Its hyperparameter views leave out constants, and a nested DeepSpeed configuration counts as one; so
strategy and batch sizes are declared by themselves.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from dsat.space.overrides import GAS
from dsat.space.plan import Plan
from dsat.tuning.strategies import make_space, rungs
from dsat.values.trial import Trial
from dsat.values.zero_strategy import of_config

KEY = "_dsat"  # of the hyperparameters


def declared(plan: Plan) -> dict[str, Any]:
    """Return types and ranges, as an experiment's configuration declares them."""
    space = make_space(plan)
    strategies = {of_config(plan.base_config), *space.strategies, *rungs(plan)}
    allowed = space.micro_batches  # ascending, perhaps a million
    sizes = {plan.own_batch.micro_batch, *allowed[:1], *allowed[-1:]}
    listed = [values for branch in space.branches for key, values in branch.knobs if key == GAS]
    settings = [{GAS: gas} for values in listed for gas in values] or [{}]
    return {
        "strategy": _categorical({strategy.name for strategy in strategies}),
        "stage": _categorical({strategy.stage for strategy in strategies}),
        "micro_batch": _integer(sizes),
        "gradient_accumulation": _integer(  # the smallest micro batch has the most
            {1, plan.own_batch.gas, *(space.batch(min(sizes), each).gas for each in settings)}
        ),
    }


def of_trial(trial: Trial) -> dict[str, Any]:
    """Return a trial's values of all declared hyperparameters."""
    return {
        "strategy": trial.strategy,
        "stage": trial.stage,
        "micro_batch": trial.batch.micro_batch,
        "gradient_accumulation": trial.batch.gas,
    }


def _categorical(values: Collection[Any]) -> dict[str, Any]:
    return {"type": "categorical", "vals": sorted(values)}


def _integer(values: Collection[int]) -> dict[str, Any]:
    least, most = min(values), max(values)
    if least == most:
        return {"type": "const", "val": least}
    return {"type": "int", "minval": least, "maxval": most}
