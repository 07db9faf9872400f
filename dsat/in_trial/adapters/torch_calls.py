"""PyTorch's functions in a trial: what is measured of a script, and where its ranks meet."""

from __future__ import annotations

from typing import Any

from dsat.in_trial import loaders, loopback, precision
from dsat.in_trial.adapters.calls import Call


def iterate(call: Call) -> Any:
    """Note the batches that a loader makes in advance, and the length of its epoch."""
    iterator = call.proceed()
    loaders.begin_epoch(call.owner, iterator)
    return iterator


def get_batch(call: Call) -> Any:
    """Measure how long the script waits for a batch."""
    return loaders.wait_for_batch(call.owner, call.proceed)


def enter_autocast(call: Call) -> Any:
    """Note the precision of autocasting."""
    result = call.proceed()
    precision.note_autocast(call.owner.device)
    return result


def backward(call: Call) -> Any:
    """Note the loss, if the script calls `loss.backward()` itself."""
    meter = call.trial.meter
    if meter is not None and meter.losses is not None:
        meter.losses.add_script_loss(call.argument("tensors", 0))  # also by `Tensor.backward`
    return call.proceed()


def build_model(call: Call) -> None:
    """Apply `--slot-memory` when the first model is built, so that imports do not count."""
    act, call.trial.calls.before_model = call.trial.calls.before_model, None
    if act is not None:
        act()
    call.proceed()


def open_store(call: Call) -> Any:
    """Listen on loopback only, if all ranks are on this host."""
    return loopback.open_store(call.proceed_with, call.args, call.kwargs)
