"""Conversion of older names and of text, which DeepSpeed accepts too, to its names and types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Current names of `zero_optimization` settings, by their aliases and deprecated names
# (runtime/zero/config.py, 0.19.8). DeepSpeed refuses a setting under two names.
_SHORT_NAMES = """
    allgather_sequential gather_16bit_weights_on_model_save max_live_parameters max_reuse_distance
    model_persistence_threshold module_granularity_threshold param_persistence_threshold
    prefetch_bucket_size use_all_reduce_for_fetch_params
""".split()
_CURRENT_NAMES = {
    **{name: f"stage3_{name}" for name in _SHORT_NAMES},
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
}


# Settings that dsat reads and that DeepSpeed's pydantic models convert: "true" to true, "5" to 5.
_MODELS = ("bf16", "bfloat16", "fp16", "tensor_parallel", "zero_optimization")
_FLAGS = """
    bf16_master_weights_and_grads bf16_optimizer_states contiguous_gradients enabled
    fp16_master_weights_and_grads overlap_comm pin_memory reduce_scatter stage3_allgather_sequential
    stage3_gather_16bit_weights_on_model_save use_multi_rank_bucket_allreduce
""".split()
_TRUTHS = dict.fromkeys("1 on t true y yes".split(), True)
_TRUTHS |= dict.fromkeys("0 off f false n no".split(), False)
# Sizes of `zero_optimization` that dsat calculates with (`ge=0` in runtime/zero/config.py, 0.19.8).
SIZES = """
    allgather_bucket_size reduce_bucket_size stage3_max_live_parameters
    stage3_prefetch_bucket_size sub_group_size zero_hpz_partition_size
""".split()


# Text that pydantic converts to an integer.
_INTEGER = re.compile(r"\s*(\+?\d+(?:_\d+)*)(?:\.0+)?\s*", re.ASCII)


def normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the current names and the types of DeepSpeed's settings."""
    found = _use_current_names(config)
    return {key: _convert(value) if key in _MODELS else value for key, value in found.items()}


def _convert(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _convert(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_convert(each, key) for each in value]
    if key in _FLAGS:
        return _TRUTHS.get(str(value).lower(), value)
    is_text = key in (*SIZES, "stage", "autotp_size") and isinstance(value, str)
    found = _INTEGER.fullmatch(value) if is_text and len(value) < 20 else None
    return int(found[1]) if found else value


def _use_current_names(config: Mapping[str, Any]) -> dict[str, Any]:
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return dict(config)
    found = {}
    for key, value in zero.items():
        name = _CURRENT_NAMES.get(key, key)
        if name in zero:  # if both names are given, both stay, and DeepSpeed refuses them
            found[key] = value
        elif not key.startswith("cpu_offload"):
            found[name] = value
        elif value:
            found[name] = {"device": "cpu"}
    return {**config, "zero_optimization": found}
