"""Whether a script does what its trial's configuration says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsat.errors import InvalidTrial

if TYPE_CHECKING:
    import torch

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


def check_inputs(values: Iterable[Any], *, micro_batch: int, own: int | None) -> str | None:
    """Compares what a script feeds its model with the trial's micro batch.

    Args:
        values: arguments of the first micro step's forward pass.
        micro_batch: the trial's.
        own: that of the user's own configuration, if it is known.

    Returns:
        A warning, if the trial's micro batch is not to be seen.

    Raises:
        InvalidTrial: the script goes on with its own micro batch: its throughput would be a lie.
    """
    shapes = [tuple(tensor.shape) for tensor in _tensors(values) if tensor.dim()]
    if not shapes or any(micro_batch in shape[:2] for shape in shapes):
        return None
    if own is not None and feeds_own(shapes, micro_batch, own):
        raise InvalidTrial(
            f"the script feeds {own} samples, its own micro batch, although the trial's "
            f"train_micro_batch_size_per_gpu is {micro_batch}: take the batch size from "
            "engine.train_micro_batch_size_per_gpu(), or name the script's flag: --arg-mapping "
            "train_micro_batch_size_per_gpu=--batch-size"
        )
    return (
        f"the script fed tensors of shape {shapes[0]} although train_micro_batch_size_per_gpu is "
        f"{micro_batch}: does its data loader take the batch size from the DeepSpeed configuration?"
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


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors among values, one level of lists, tuples and dicts deep."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from (v for v in value.values() if isinstance(v, torch.Tensor))
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, torch.Tensor))
