"""Lightning's Trainer inside a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import wrapt

from dsat.inputs.switches import OTHER_ACCUMULATION

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def install(gas: int, warn: Callable[[str], None]) -> None:
    """Make Lightning's Trainer count optimizer steps as the trial's engine makes them.

    It counts them by `accumulate_grad_batches`, and so ends the training and schedules the learning
    rate. Read for it: lightning 2.6.
    """

    def setup(original: Callable[..., Any], _: Any, positional: Any, keywords: Any) -> Any:
        trainer = positional[0] if positional else keywords["trainer"]
        # A module that steps by itself counts by itself, and Lightning refuses accumulation there.
        if trainer.lightning_module.automatic_optimization:
            if trainer.accumulate_grad_batches != gas:
                warn(OTHER_ACCUMULATION)
            trainer.accumulate_grad_batches = gas
        return original(*positional, **keywords)

    def adapt(module: Any) -> None:
        # Before it makes the optimizer and its schedule.
        wrapt.wrap_function_wrapper(module, "DeepSpeedStrategy.setup", setup)

    for package in _PACKAGES:
        wrapt.register_post_import_hook(adapt, f"{package}.strategies.deepspeed")
