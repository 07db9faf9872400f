"""Limits on a device's memory, and the free memory that DeepSpeed sees.

By that, ZeRO decides whether parameters are flattened on the device or on the host
(`available_memory` in deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8).
"""

from __future__ import annotations

from typing import Any

_limit_bytes: int | None = None  # of a slot


def limit(limit_bytes: int | None) -> None:
    """Have DeepSpeed find no more memory than a slot may use."""
    global _limit_bytes
    _limit_bytes = limit_bytes


def available(free_bytes: int, accelerator: Any, index: int | None) -> int:
    """Return the memory that is free of a device, within the limit."""
    if _limit_bytes is None:
        return free_bytes
    return min(free_bytes, _limit_bytes - int(accelerator.memory_allocated(index)))


def limit_allocator(limit_bytes: int | None, device: int) -> None:
    """Make the allocator of a CUDA device refuse more than a slot may use."""
    from deepspeed.accelerator import get_accelerator

    if limit_bytes is None or get_accelerator().device_name() != "cuda":
        return
    import torch

    fraction = limit_bytes / get_accelerator().total_memory(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), device)
