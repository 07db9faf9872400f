"""Checks that a script uses the configuration of its trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsat.errors import InvalidTrial
from dsat.in_trial.agreement import rank_and_size
from dsat.in_trial.meter_spec import MeterSpec, parallelism_of
from dsat.values.format import count
from dsat.values.parallelism import SEQUENCE_SIZE, TENSOR_SIZE

ULYSSES = (
    "The script must take it from the DeepSpeed configuration: pass UlyssesSPAttentionHF."
    f'register_with_transformers(..., sequence_parallel_size=config.get("{SEQUENCE_SIZE}", 1)) '
    "as mpu, and wrap the data loader in UlyssesSPDataLoaderAdapter. A Trainer (accelerate 1.12 or "
    "newer) only needs position_ids in its batches"
)


def check_arguments(arguments: Mapping[str, Any], slots: int) -> None:
    """Check the arguments of `deepspeed.initialize`, before DeepSpeed fails less clearly.

    Raises:
        InvalidTrial: the number of ranks differs from `slots` (0 if unknown), the model is a
            PipelineModule, or an mpu of the script lets ranks share samples.
    """
    _, ranks = rank_and_size()
    if slots and ranks != slots:
        raise InvalidTrial(
            f"the script runs {count(ranks, 'rank')} on {count(slots, 'device')}. Start one rank "
            "for each device, or set the devices of a trial to the number of ranks "
            "(resources.slots_per_trial, --devices)"
        )
    if any(cls.__name__ == "PipelineModule" for cls in type(arguments.get("model")).__mro__):
        raise InvalidTrial(
            "deepspeed.initialize was given a PipelineModule: pipeline parallel models cannot be "
            "tuned. Train the model without PipelineModule"
        )
    mpu: Any = arguments.get("mpu")
    if hasattr(mpu, "get_data_parallel_world_size") and mpu.get_data_parallel_world_size() < ranks:
        raise InvalidTrial(
            "the script passes its own mpu to deepspeed.initialize, so that ranks share samples. "
            "dsat tunes only DeepSpeed's own parallelism: tensor_parallel.autotp_size in the "
            "DeepSpeed configuration (AutoTP), and Ulysses sequence parallelism"
        )


def check_engine(engine: Any, spec: MeterSpec) -> None:
    """Raise InvalidTrial if an engine's batch, stage or parallelism differs from its trial's."""
    micro_batch = engine.train_micro_batch_size_per_gpu()
    settings = {
        "train_micro_batch_size_per_gpu": (micro_batch, spec.micro_batch),
        "gradient_accumulation_steps": (engine.gradient_accumulation_steps(), spec.gas),
        "zero_optimization.stage": (engine.zero_optimization_stage(), spec.stage),
    }
    for key, (value, expected) in settings.items():
        if value != expected:
            raise InvalidTrial(
                f"the script does not use the trial's configuration: {key} is {value}, not "
                f"{expected}. Pass the result of dsat.get_ds_config_from_hparams(hparams) to "
                "deepspeed.initialize(config=...)"
            )
    engine_value, trial_value = parallelism_of(engine), spec.parallelism
    if engine_value.tensor != trial_value.tensor:
        raise InvalidTrial(
            f"{TENSOR_SIZE} is {engine_value.tensor} in the script's engine, not "
            f"{trial_value.tensor}. Set it only in the DeepSpeed configuration, and do not call "
            "deepspeed.tp_model_init"
        )
    if engine_value.sequence != trial_value.sequence:
        raise InvalidTrial(
            f"{SEQUENCE_SIZE} is {engine_value.sequence} in the script's engine, not "
            f"{trial_value.sequence}. {ULYSSES}"
        )
