"""Whether a script does what its trial's configuration says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsat.errors import InvalidTrial

Shape = tuple[int, ...]


def refuse_pipeline(engine: Any) -> None:
    """Raise InvalidTrial for a pipeline's engine."""
    if any(cls.__name__ == "PipelineEngine" for cls in type(engine).__mro__):
        raise InvalidTrial(
            "deepspeed.initialize returned a PipelineEngine: pipeline parallel models cannot be "
            "tuned. Train the model without PipelineModule"
        )


def check_engine(engine: Any, *, micro_batch: int, gas: int, stage: int) -> None:
    """Raise InvalidTrial if an engine uses other settings than the trial's."""
    found = {
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "zero_optimization.stage": engine.zero_optimization_stage(),
    }
    expected = dict(zip(found, (micro_batch, gas, stage), strict=True))
    for key, value in expected.items():
        if found[key] != value:
            raise InvalidTrial(
                f"the script does not use the trial's configuration: {key} is {found[key]}, not "
                f"{value}. Pass the result of dsat.get_ds_config_from_hparams(hparams) to "
                "deepspeed.initialize(config=...)"
            )


def feeds_own(shapes: Sequence[Shape], micro_batch: int, own: int) -> bool:
    """Whether tensors without the trial's micro batch certainly have the user's own.

    All of them must have it in front, those with a single row excepted, which are for all samples.
    Twice the trial's micro batch may be pairs (a chosen and a rejected answer, two views of an
    image), and the throughput of a script that feeds more than it says is not too high.
    """
    if own in (micro_batch, 2 * micro_batch):
        return False
    rows = {shape[0] for shape in shapes}
    return rows in ({own}, {own, 1})
