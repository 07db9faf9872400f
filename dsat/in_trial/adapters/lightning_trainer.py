"""Lightning's Trainer inside a trial."""

from __future__ import annotations

from typing import Any

from dsat.command.switches import OTHER_ACCUMULATION
from dsat.in_trial.adapters.calls import Call


def set_up(call: Call) -> Any:
    """Set the Trainer's `accumulate_grad_batches` to the trial's accumulation steps.

    By this number Lightning counts optimizer steps, to end the training and to schedule the
    learning rate. The wrapper runs before Lightning makes the optimizer and the schedule (lightning
    2.6).
    """
    trial, trainer = call.trial, call.argument("trainer", 0)
    # With manual optimization the module counts steps, and Lightning refuses accumulation.
    if trial.config is not None and trainer.lightning_module.automatic_optimization:
        gas = int(trial.config["gradient_accumulation_steps"])
        if trainer.accumulate_grad_batches != gas:
            trial.warn(OTHER_ACCUMULATION)
        trainer.accumulate_grad_batches = gas
    return call.proceed()
