"""Host memory of ranks: offloaded state, and the weights that a script loads before training."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from dsat.memory.facts import ModelFacts, Setup
from dsat.values import hazards
from dsat.values.zero_strategy import CPU

PER_HOST = 8  # devices of a typical host
_WITHOUT_PINNING = "<0.19.5"  # versions; runtime/zero/offload_config.py
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ROUNDED = re.compile(r"\bpinned_max_(?:round_threshold|cached_size)_mb:(\d+)")


def training(facts: ModelFacts, config: Mapping[str, Any], *, slots: int) -> tuple[float, float]:
    """Return the pinned and the pageable bytes of a rank's offloaded state.

    Buffers for state on NVMe and the script's own memory are not counted.
    """
    s = Setup.of(facts, config, slots)
    blocks, pinned, pageable = list(_optimizer_blocks(s)), 0.0, 0.0
    if s.strategy.offload_param == CPU:  # always pinned, whatever the setting
        pinned = pinned_bytes(s.model_bytes * s.facts.num_params / s.slots)
        pinned += s.secondary_bytes
    if s.strategy.offload_optimizer == CPU:
        pageable = (12 if s.strategy.stage == 3 else 8) * (s.shard - sum(s.kept_groups))
    if is_pinned(config):
        return pinned + sum(map(pinned_bytes, blocks)), pageable
    return pinned, pageable + sum(blocks)


def loaded_bytes(facts: ModelFacts, config: Mapping[str, Any]) -> int:
    """Return the bytes of weights that each rank loads on the host before training.

    There are none in stage 3 if the model is made under `zero.Init`, which partitions it at once.
    """
    s = Setup.of(facts, config, 1)
    is_divided = s.strategy.stage == 3 and facts.uses_zero_init
    return 0 if is_divided else s.model_bytes * facts.num_params


def bytes_of_host(
    facts: ModelFacts, config: Mapping[str, Any], rank_bytes: float, slots: int
) -> int:
    """Return the bytes that all ranks of a typical host need to load the weights or to train.

    The larger of the two needs counts.

    Args:
        rank_bytes: host memory of a rank while it trains.
    """
    return round(ranks(slots) * max(rank_bytes, loaded_bytes(facts, config)))


def ranks(slots: int) -> int:
    """Return the number of ranks on a typical host."""
    return min(slots, PER_HOST)


def saved_without_pinning(facts: ModelFacts, config: Mapping[str, Any], *, slots: int) -> int:
    """Return the bytes that `"pin_memory": false` saves for all ranks of a typical host."""
    if not is_pinned(config):
        return 0
    blocks = _optimizer_blocks(Setup.of(facts, config, slots))
    return ranks(slots) * round(sum(pinned_bytes(size) - size for size in blocks))


def is_pinned(config: Mapping[str, Any]) -> bool:
    """Return whether offloaded optimizer state is pinned; the default depends on DeepSpeed."""
    section = (config.get("zero_optimization") or {}).get("offload_optimizer")
    pins = section.get("pin_memory") if isinstance(section, Mapping) else None
    return pins_by_default() if pins is None else pins is not False


@functools.cache
def pins_by_default() -> bool:
    """Return whether the installed DeepSpeed pins offloaded state by default."""
    try:
        return not hazards.is_one_of(metadata.version("deepspeed"), _WITHOUT_PINNING)
    except metadata.PackageNotFoundError:
        return True


def pinned_bytes(size: float) -> int:
    """Return the bytes allocated for a pinned block of `size` bytes.

    torch rounds up to a power of two (ATen/core/CachingHostAllocator.h), unless environment
    variables of torch or DeepSpeed prevent it.
    """
    whole = math.ceil(size)
    settings = ",".join(os.environ.get(name, "") for name in _ALLOCATOR)
    limits = [int(limit) * 2**20 for limit in _ROUNDED.findall(settings)]
    is_native = os.environ.get("DS_PIN_MEMORY_BACKEND", "").strip().lower() == "native"
    if whole <= 0 or is_native or whole > min(limits, default=whole):
        return max(0, whole)
    return 1 << (whole - 1).bit_length()


def _optimizer_blocks(s: Setup) -> Iterator[float]:
    """Yield the bytes of each block of a rank's offloaded optimizer state that may be pinned."""
    if s.strategy.offload_optimizer != CPU:
        return
    if s.strategy.stage != 3:
        yield from (4 * s.shard, 4 * s.shard, s.model_bytes * s.shard)
        yield s.model_bytes * s.facts.largest_param
        return
    yield s.accumulation_bytes * s.shard
    yield from (4 * size for size in s.groups[len(s.kept_groups) :])  # gradients
