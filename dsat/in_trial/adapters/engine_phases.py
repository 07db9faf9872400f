"""Methods of the engine that trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsat.in_trial import losses
from dsat.in_trial.adapters.calls import Original
from dsat.in_trial.adapters.trial import RunningTrial


def measure(phase: str) -> Callable[..., Any]:
    """Return a wrapper of the engine's method for a phase of an optimizer step."""

    def run_phase(
        trial: RunningTrial, original: Original, engine: Any, args: Any, kwargs: Any
    ) -> Any:
        """Measure the phase: time, samples, loss and memory."""
        if trial.meter is None:
            return original(*args, **kwargs)
        return trial.meter.call(engine, phase, original, args, kwargs)

    return run_phase


def scale(_: RunningTrial, original: Original, engine: Any, args: Any, kwargs: Any) -> Any:
    """Note the loss that fp16 scales in `engine.scale(loss).backward()`."""
    result = original(*args, **kwargs)
    losses.note_scaled(engine, result, kwargs.get("loss", args[0] if args else None))
    return result
