"""PyTorch's functions in a trial: what is measured of a script, and where its ranks meet."""

from __future__ import annotations

from typing import Any

from dsat.in_trial import loaders, loopback, precision
from dsat.in_trial.adapters.calls import Original
from dsat.in_trial.adapters.trial import RunningTrial


def iterate(_: RunningTrial, original: Original, loader: Any, args: Any, kwargs: Any) -> Any:
    """Note the batches that a loader makes in advance, and the length of its epoch."""
    iterator = original(*args, **kwargs)
    loaders.begin_epoch(loader, iterator)
    return iterator


def get_batch(_: RunningTrial, original: Original, iterator: Any, args: Any, kwargs: Any) -> Any:
    """Measure how long the script waits for a batch."""
    return loaders.wait_for_batch(iterator, lambda: original(*args, **kwargs))


def enter_autocast(
    _: RunningTrial, original: Original, context: Any, args: Any, kwargs: Any
) -> Any:
    """Note the precision of autocasting."""
    result = original(*args, **kwargs)
    precision.note_autocast(context.device)
    return result


def backward(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Note the loss, if the script calls `loss.backward()` itself."""
    if trial.meter is not None and trial.meter.losses is not None:
        # `Tensor.backward` calls this, too.
        trial.meter.losses.add_script_loss(kwargs.get("tensors", args[0] if args else None))
    return original(*args, **kwargs)


def build_model(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> None:
    """Limit the memory of a slot from the first model on, so that imports do not count."""
    act, trial.calls.before_model = trial.calls.before_model, None
    if act is not None:
        act()
    original(*args, **kwargs)


def open_store(_: RunningTrial, original: Original, __: Any, args: Any, kwargs: Any) -> Any:
    """Listen on loopback where the other ranks look for rank 0 there, and nowhere else."""
    return loopback.open_store(original, args, kwargs)
