"""Adapters of PyTorch's functions that measure a script, or limit its memory and network."""

from __future__ import annotations

from typing import Any

from dsat.in_trial import loaders, loopback, precision
from dsat.in_trial.adapters.calls import Call


def iterate(call: Call) -> Any:
    """Record how many batches a loader prepares in advance, and the length of its epoch."""
    iterator = call.proceed()
    loaders.begin_epoch(call.owner, iterator)
    return iterator


def get_batch(call: Call) -> Any:
    """Measure how long the script waits for a batch."""
    return loaders.wait_for_batch(call.owner, call.proceed)


def enter_autocast(call: Call) -> Any:
    """Record the precision of autocasting."""
    result = call.proceed()
    precision.note_autocast(call.owner.device)
    return result


def backward(call: Call) -> Any:
    """Record the loss, if the script calls `loss.backward()` itself."""
    meter = call.trial.meter
    if meter is not None and meter.losses is not None:
        meter.losses.add_script_loss(call.argument("tensors", 0))  # from `Tensor.backward` too
    return call.proceed()


def build_model(call: Call) -> None:
    """On CPUs, apply `--slot-memory` from the first model on, so that imports do not count."""
    act, call.trial.calls.before_model = call.trial.calls.before_model, None
    if act is not None:
        act()
    call.proceed()


def open_store(call: Call) -> Any:
    """Listen on loopback only, if the address of rank 0 is a loopback address."""
    return loopback.open_store(call.proceed_with, call.args, call.kwargs)
