"""Settings that DeepSpeed takes in every combination, so that it need not be asked.

That it does is tested against the installed one. Whatever is not among them is asked of DeepSpeed
itself, which takes seconds; nothing is refused by what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsat.inputs import ds_config
from dsat.inputs.ds_config import AUTO, NONE, TOP_LEVEL_KEYS
from dsat.inputs.ds_schema import Schema

_ANYTHING = frozenset(
    """
    activation_checkpointing autotuning comet comms_logger csv_monitor dataloader_drop_last
    dump_state flops_profiler gradient_accumulation_steps gradient_clipping log_level
    memory_breakdown scheduler steps_per_print tensorboard timers train_batch_size
    train_micro_batch_size_per_gpu wall_clock_breakdown wandb zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer
    """.split()
)
_OPTIMIZERS = ("adam", "adamw")
_OF_OPTIMIZER = frozenset("lr betas eps weight_decay torch_adam adam_w_mode".split())
_OF_PRECISION = frozenset(
    "enabled auto_cast loss_scale initial_scale_power hysteresis consecutive_hysteresis".split()
)
_PRECISIONS = ("bf16", "bfloat16", "fp16")
_SWITCHES = frozenset(
    """
    allgather_partitions contiguous_gradients overlap_comm reduce_scatter round_robin_gradients
    stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params
    stage3_allgather_sequential
    """.split()
)
_OFFLOADS = ("offload_optimizer", "offload_param")
_OF_OFFLOAD = frozenset("device pin_memory buffer_count fast_init".split())
_STAGE_OF_PARAMETERS = 3


def is_plain(config: Mapping[str, Any], schema: Schema) -> bool:
    """Whether a configuration has none but such settings, and DeepSpeed's own defaults.

    Args:
        config: that the schema takes.
        schema: of the installed DeepSpeed.
    """
    if sum(_is_on(config.get(name)) for name in _PRECISIONS) > 1:
        return False
    return all(
        value in (None, AUTO)
        or key in _ANYTHING
        or key not in TOP_LEVEL_KEYS
        or _is_plain_section(key, value)
        or _is_default(schema, key, value)
        for key, value in config.items()
    ) and _is_plain_zero(config.get("zero_optimization") or {}, schema)


def _is_plain_section(key: str, value: Any) -> bool:
    if key == "optimizer":
        kind = str(value.get("type") or "").lower()
        return kind in _OPTIMIZERS and _OF_OPTIMIZER.issuperset(value.get("params") or {})
    if key in _PRECISIONS:
        return _OF_PRECISION.issuperset(value)
    return key == "zero_optimization"  # which is looked at by itself


def _is_plain_zero(zero: Mapping[str, Any], schema: Schema) -> bool:
    stage = zero.get("stage", 0)
    for key, value in zero.items():
        if key == "stage" or value in (None, AUTO) or key in _SWITCHES:
            continue
        if key in _OFFLOADS:
            if not _is_plain_offload(key, value, stage):
                return False
        elif key in ds_config.INTEGER_SETTINGS and key != "zero_hpz_partition_size":
            if value % 2:  # sizes of messages are aligned
                return False
        elif not _is_default(schema, f"zero_optimization.{key}", value):
            return False
    return True


def _is_plain_offload(key: str, section: Mapping[str, Any], stage: int) -> bool:
    device = section.get("device") or NONE
    if device == NONE:
        return True
    least = _STAGE_OF_PARAMETERS if key == "offload_param" else 1
    others = {k: v for k, v in section.items() if (k, v) != ("ratio", 1.0)}
    return device == "cpu" and stage >= least and _OF_OFFLOAD.issuperset(others)


def _is_default(schema: Schema, path: str, value: Any) -> bool:
    try:
        found = schema.default(path)
    except KeyError:
        return False
    return bool(value == found) and isinstance(value, bool) == isinstance(found, bool)


def _is_on(section: Any) -> bool:
    return bool((section or {}).get("enabled"))
