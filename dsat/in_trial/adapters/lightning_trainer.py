"""Lightning's Trainer inside a trial."""

from __future__ import annotations

from typing import Any

from dsat.command.switches import OTHER_ACCUMULATION, OTHER_LIMITS
from dsat.in_trial.adapters.calls import Call

_LIMITS = ("limit_train_batches", "val_check_interval")  # whole numbers count micro batches


def set_up(call: Call) -> Any:
    """Set the Trainer's `accumulate_grad_batches` to the trial's accumulation steps.

    From this number, Lightning counts optimizer steps to end the training and to schedule the
    learning rate. Limits in micro batches are scaled to allow as many optimizer steps as before.
    The wrapper runs before Lightning makes the optimizer and the schedule (lightning 2.6).
    """
    trial, trainer = call.trial, call.argument("trainer", 0)
    # With manual optimization the module counts steps, and Lightning refuses accumulation.
    if trial.config is not None and trainer.lightning_module.automatic_optimization:
        gas = int(trial.config["gradient_accumulation_steps"])
        script_gas, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, gas
        # Lightning refuses this setting in a file, which the strategy has already read.
        file_gas = (call.owner.config or {}).pop("gradient_accumulation_steps", None)
        if file_gas is not None or script_gas != gas:
            trial.warn(OTHER_ACCUMULATION)
        # A flag may already have set the trial's value, while the limits still fit the user's own.
        own_steps = trial.trainer.trial.own_steps
        own_gas = own_steps.gas if script_gas == gas and own_steps is not None else script_gas
        if own_gas != gas:
            for name in _LIMITS:
                if isinstance(limit := getattr(trainer, name), int):
                    trial.warn(OTHER_LIMITS)
                    setattr(trainer, name, max(1, limit * gas // own_gas))
    return call.proceed()
