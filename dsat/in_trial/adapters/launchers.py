"""What a script expects of a launcher that did not start it."""

from __future__ import annotations

from typing import Any

from dsat.in_trial.adapters.calls import Original
from dsat.in_trial.adapters.trial import RunningTrial


def add_argument(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Make the rank's own `--local_rank` the default, as a launcher would pass it.

    The script's default is mostly 0 or -1, and DeepSpeed refuses to run if it is not the rank's.
    """
    if trial.local_rank is not None and "--local_rank" in args and "action" not in kwargs:
        kwargs = {**kwargs, "default": int(trial.local_rank), "required": False}
    return original(*args, **kwargs)
