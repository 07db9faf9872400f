"""Hyperparameters that vary between trials, declared for the plots of the web UI.

Its hyperparameter views leave out constants, and a nested DeepSpeed configuration counts as one; so
each choice of the search is declared here by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsat.space.knobs import defaults
from dsat.space.overrides import GAS, TOP_SECTIONS
from dsat.space.plan import Plan
from dsat.space.space import Space
from dsat.tuning.strategies import make_space, rungs
from dsat.values.trial import Trial
from dsat.values.zero_strategy import of_config

KEY = "_dsat"  # of the hyperparameters
_MICRO_BATCH, _GAS, _STRATEGY, _STAGE = "micro_batch", "gradient_accumulation", "strategy", "stage"


def declared(plan: Plan) -> dict[str, Any]:
    """Return types and ranges, as an experiment's configuration declares them."""
    space = make_space(plan)
    strategies = [of_config(plan.base_config), *space.strategies, *rungs(plan)]
    sizes = {plan.own_batch.micro_batch, space.micro_batches[0], space.micro_batches[-1]}
    return {
        _STRATEGY: _categorical(sorted({strategy.name for strategy in strategies})),
        _STAGE: _categorical(sorted({strategy.stage for strategy in strategies})),
        _MICRO_BATCH: _integer(sizes),
        _GAS: _integer(_accumulations(plan, space)),
        **{name: _knob(values) for name, values in _knobs(space).items()},
    }


def of_trial(plan: Plan, trial: Trial) -> dict[str, Any]:
    """Return a trial's values of all declared hyperparameters."""
    config = plan.config(trial.overrides)
    zero = _flat(config.get("zero_optimization") or {})
    beside = _flat({section: config.get(section) or {} for section in TOP_SECTIONS})
    given = {**defaults(trial.stage), **zero, **beside, **plan.switches, **trial.script_args}
    return {
        _STRATEGY: trial.strategy,
        _STAGE: trial.stage,
        _MICRO_BATCH: trial.batch.micro_batch,
        _GAS: trial.batch.gas,
        # Where its stage does not read it, a value that can be plotted.
        **{name: given.get(name, values[0]) for name, values in _knobs(make_space(plan)).items()},
    }


def _knobs(space: Space) -> dict[str, list[Any]]:
    """Return the values of each knob over all strategies."""
    found: dict[str, list[Any]] = {}
    for branch in space.branches:
        for key, values in branch.knobs:
            if key == GAS or any(isinstance(value, Mapping) for value in values):
                continue
            known = found.setdefault(key, [])
            known += [value for value in values if value not in known]
    return found


def _accumulations(plan: Plan, space: Space) -> set[int]:
    smallest, largest = space.micro_batches[0], space.micro_batches[-1]
    listed = [values for branch in space.branches for key, values in branch.knobs if key == GAS]
    settings = [{GAS: gas} for values in listed for gas in values] or [{}]
    sizes = [space.batch(size, each).gas for size in (smallest, largest) for each in settings]
    return {1, plan.own_batch.gas, *sizes}


def _knob(values: Sequence[Any]) -> dict[str, Any]:
    """Declare a knob; numbers, which span orders of magnitude, as a logarithmic range."""
    numbers = [value for value in values if type(value) in (int, float) and value > 0]
    if len(numbers) < 2 or len(numbers) < len(values):
        return _categorical(values)
    exponents = sorted(math.log10(value) for value in numbers)
    return {"type": "log", "base": 10, "minval": exponents[0], "maxval": exponents[-1]}


def _categorical(values: Iterable[Any]) -> dict[str, Any]:
    return {"type": "categorical", "vals": list(values)}


def _integer(values: Iterable[int]) -> dict[str, Any]:
    least, *_, most = (*sorted(values), max(values))
    if least == most:
        return {"type": "const", "val": least}
    return {"type": "int", "minval": least, "maxval": most}


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
