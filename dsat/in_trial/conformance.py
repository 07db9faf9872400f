"""Checks that a script does what its trial's configuration says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsat.errors import InvalidTrial
from dsat.in_trial import start_recorder

Shape = tuple[int, ...]


def refuse_pipeline(arguments: Mapping[str, Any]) -> None:
    """Raise InvalidTrial for a pipeline, before DeepSpeed refuses it with a stage or a batch.

    Args:
        arguments: of `deepspeed.initialize`, by name.
    """
    if any(cls.__name__ == "PipelineModule" for cls in type(arguments.get("model")).__mro__):
        raise InvalidTrial(
            "deepspeed.initialize was given a PipelineModule: pipeline parallel models cannot be "
            "tuned. Train the model without PipelineModule"
        )


def refuse_other_ranks(slots: int) -> None:
    """Raise InvalidTrial if a trial has another number of ranks than slots.

    DeepSpeed would say that the batch sizes contradict each other.

    Args:
        slots: 0 if that is not known yet.
    """
    _, ranks = start_recorder.rank_and_size()
    if slots and ranks != slots:
        raise InvalidTrial(
            f"{ranks} rank{'s' if ranks > 1 else ''} on {slots} slots: let the entrypoint start a "
            "rank for each slot, or give a trial as many slots as it starts ranks "
            "(resources.slots_per_trial, --slots)"
        )


def refuse_shared_samples(arguments: Mapping[str, Any]) -> None:
    """Raise InvalidTrial if ranks are to work on the same samples.

    DeepSpeed would say that the batch sizes contradict each other (`DeepSpeedConfig.__init__`,
    0.19.8).

    Args:
        arguments: of `deepspeed.initialize`, by name.
    """
    import torch.distributed as dist

    mpu: Any = arguments.get("mpu")
    mesh = arguments.get("mesh_param")
    sharing = 1
    if hasattr(mpu, "get_data_parallel_world_size") and dist.is_initialized():
        sharing = dist.get_world_size() // mpu.get_data_parallel_world_size()
    elif hasattr(mpu, "get_sequence_parallel_world_size"):
        sharing = mpu.get_sequence_parallel_world_size()
    elif mesh:  # data parallel, sequence parallel
        sharing = mesh[1]
    if sharing > 1:
        name = "mpu" if mpu is not None else "mesh_param"
        raise InvalidTrial(
            f"{sharing} slots share each sample by the {name} that the script passes to "
            "deepspeed.initialize, and dsat tunes data-parallel training only. Leave it out to "
            "tune the rest; memory and speed are then those without it"
        )


def _check_world(engine: Any) -> None:
    """Raise InvalidTrial if fewer than all ranks have samples of their own."""
    import torch.distributed as dist

    own, ranks = getattr(engine, "dp_world_size", None), 1
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
    if isinstance(own, int) and own < ranks:
        raise InvalidTrial(
            f"{ranks // own} slots share each sample (deepspeed.tp_model_init?), and dsat tunes "
            "data-parallel training only"
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
    _check_world(engine)


def feeds_own(shapes: Sequence[Shape], micro_batch: int, own: int) -> bool:
    """Tell whether tensors without the trial's micro batch certainly have the user's own.

    All of them must have it in front, those with a single row excepted, which are for all samples.
    Twice the trial's micro batch may be pairs (a chosen and a rejected answer, two views of an
    image), and the throughput of a script that feeds more than it says is not too high.
    """
    if own in (micro_batch, 2 * micro_batch):
        return False
    rows = {shape[0] for shape in shapes}
    return rows in ({own}, {own, 1})
