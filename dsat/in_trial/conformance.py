"""Checks that a script does what its trial's configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsat.errors import InvalidTrial
from dsat.in_trial.agreement import rank_and_size


def check_arguments(arguments: Mapping[str, Any], slots: int) -> None:
    """Check the arguments of `deepspeed.initialize`, of whose consequences DeepSpeed complains.

    Args:
        arguments: by name.
        slots: of the trial; 0 if that is not known yet.

    Raises:
        InvalidTrial: there is another number of ranks than slots, or the training is not data
            parallel.
    """
    _, ranks = rank_and_size()
    if slots and ranks != slots:
        raise InvalidTrial(
            f"{ranks} rank{'s' if ranks > 1 else ''} on {slots} slots: let the entrypoint start a "
            "rank for each slot, or give a trial as many slots as it starts ranks "
            "(resources.slots_per_trial, --slots)"
        )
    if any(cls.__name__ == "PipelineModule" for cls in type(arguments.get("model")).__mro__):
        raise InvalidTrial(
            "deepspeed.initialize was given a PipelineModule: pipeline parallel models cannot be "
            "tuned. Train the model without PipelineModule"
        )
    name, sharing = _ranks_of_a_sample(arguments)
    if sharing > 1:
        raise InvalidTrial(
            f"{sharing} slots share each sample by the {name} that the script passes to "
            "deepspeed.initialize, and dsat tunes data-parallel training only. Leave it out to "
            "tune the rest; memory and speed are then those without it"
        )


def check_engine(engine: Any, *, micro_batch: int, gas: int, stage: int) -> None:
    """Check the settings of an engine.

    Raises:
        InvalidTrial: they are not the trial's.
    """
    found = {
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "zero_optimization.stage": engine.zero_optimization_stage(),
    }
    for (key, value), expected in zip(found.items(), (micro_batch, gas, stage), strict=True):
        if value != expected:
            raise InvalidTrial(
                f"the script does not use the trial's configuration: {key} is {value}, not "
                f"{expected}. Pass the result of dsat.get_ds_config_from_hparams(hparams) to "
                "deepspeed.initialize(config=...)"
            )
    own, (_, ranks) = getattr(engine, "dp_world_size", None), rank_and_size()
    if isinstance(own, int) and own < ranks:
        raise InvalidTrial(
            f"{ranks // own} slots share each sample (deepspeed.tp_model_init?), and dsat tunes "
            "data-parallel training only"
        )


def _ranks_of_a_sample(arguments: Mapping[str, Any]) -> tuple[str, int]:
    """The argument by which several ranks work on the same sample, and their number."""
    mpu: Any = arguments.get("mpu")
    mesh = arguments.get("mesh_param")  # data parallel, sequence parallel
    if hasattr(mpu, "get_data_parallel_world_size"):
        return "mpu", rank_and_size()[1] // mpu.get_data_parallel_world_size()
    if hasattr(mpu, "get_sequence_parallel_world_size"):
        return "mpu", mpu.get_sequence_parallel_world_size()
    return "mesh_param", mesh[1] if mesh else 1
