"""DeepSpeed's functions in a trial."""

from __future__ import annotations

import inspect
from typing import Any

from dsat.in_trial.adapters.calls import Original
from dsat.in_trial.adapters.trial import Phase, RunningTrial


def initialize(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Make the engine with the trial's configuration, and have it measured."""
    try:
        bound = inspect.signature(original.function).bind(*args, **kwargs)
    except TypeError:  # the script's own mistake, which DeepSpeed reports
        return original(*args, **kwargs)
    if trial.phase is Phase.PREPARING:
        trial.phase = Phase.MEASURING
    for before in trial.before_engine:
        before(bound.arguments)
    if trial.make_engine is None:
        result = original(*bound.args, **bound.kwargs)
    else:
        result = trial.make_engine(original.function, *bound.args, **bound.kwargs)
    for after in trial.after_engine:
        after(result[0])
    return result
