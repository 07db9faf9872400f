"""DeepSpeed's functions in a trial."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from dsat.in_trial.adapters import calls
from dsat.in_trial.adapters.calls import Call
from dsat.in_trial.adapters.trial import Phase

ZERO_INIT = (
    "the script uses deepspeed.zero.Init in every stage, so training below stage 3 would fail. "
    "Trials disable it there. In your script, pass enabled=(stage == 3) to zero.Init"
)


def initialize(call: Call) -> Any:
    """Make the engine with the trial's configuration; in trials, measure it."""
    trial = call.trial
    try:
        bound = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    except TypeError:  # the script's own mistake, which DeepSpeed reports
        return call.proceed()
    if trial.phase is Phase.PREPARING:
        trial.phase = Phase.MEASURING
    for hook in trial.calls.before_engine:
        hook(bound.arguments)
    if trial.calls.make_engine is None:
        result = call.proceed_with(*bound.args, **bound.kwargs)
    else:
        result = trial.calls.make_engine(call.function, *bound.args, **bound.kwargs)
    for hook in trial.calls.after_engine:
        hook(result[0])
    return result


def open_zero_init(call: Call) -> None:
    """Disable `zero.Init` below stage 3, unless a finished module is passed to it.

    Scripts often open `zero.Init` because their own configuration has stage 3, but lower stages
    cannot train a partitioned model. Libraries (`from_pretrained`) open it only in stage 3, so they
    need no warning.
    """
    trial = call.trial
    zero = (trial.config or {}).get("zero_optimization") or {}
    # A single run of the script is simulated for all stages.
    if trial.config is None or trial.is_simulated or zero.get("stage", 0) >= 3:
        call.proceed()
        return
    bound = inspect.signature(call.function).bind_partial(*call.args, **call.kwargs)
    if bound.arguments.get("module") is None:
        is_library = f"-packages{os.sep}" in calls.caller().f_code.co_filename
        if bound.arguments.get("enabled", True) and not is_library:
            trial.warn(ZERO_INIT)
        bound.arguments["enabled"] = False
    call.proceed_with(*bound.args, **bound.kwargs)


def compile_operator(call: Call) -> Any:
    """Tell the user when DeepSpeed compiles an operator; suspend a memory limit on CPUs."""
    activity = f"compiling DeepSpeed's operator {call.owner.name}, once for all runs"
    with call.trial.progress.during(activity), call.trial.calls.around_compilation():
        return call.proceed()


def available(call: Call) -> int:
    """Report at most the memory that `--slot-memory` allows.

    From this number, ZeRO decides whether to flatten parameters on the device or on the host
    (deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8).
    """
    free_bytes, meter = int(call.proceed()), call.trial.meter
    limit_bytes = None if meter is None else meter.spec.options.slot_memory_bytes
    if limit_bytes is None:
        return free_bytes
    index = call.argument("device_index", 0)
    return min(free_bytes, int(limit_bytes - call.owner.memory_allocated(index)))


def measure(phase: str) -> Callable[..., Any]:
    """Return a wrapper for an engine's method: `forward`, `backward` or `step`."""

    def run_phase(call: Call) -> Any:
        """Measure the phase: time, samples, loss and memory."""
        return call.trial.meter.call(phase, call)

    return run_phase


def scale(call: Call) -> Any:
    """Record the unscaled loss of `engine.scale(loss).backward()` in fp16."""
    result, losses = call.proceed(), call.trial.meter.losses
    if losses is not None:
        losses.note_scaled_loss(call.owner, result, call.argument("loss", 0))
    return result
