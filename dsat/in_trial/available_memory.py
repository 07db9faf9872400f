"""Limits on a device's memory, and the free memory that DeepSpeed sees.

By that, ZeRO decides whether parameters are flattened on the device or on the host
(`available_memory` in deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

BY_NAME = (
    "DeepSpeed does not understand CUDA_VISIBLE_DEVICES={devices} while pynvml is installed, and "
    "fails when you train: give the GPUs by number, or uninstall pynvml (nvidia-ml-py)"
)


_limit_bytes: int | None = None  # of a slot


def limit(limit_bytes: int | None) -> None:
    """Have DeepSpeed find no more memory than a slot may use."""
    global _limit_bytes
    _limit_bytes = limit_bytes


def available(
    ask: Callable[[int | None], Any],
    accelerator: Any,
    index: int | None,
    warn: Callable[[str], None],
) -> int:
    """Return the memory that is left of a device, also if it is named, within the limit.

    With pynvml DeepSpeed asks NVML, by a number that it reads from CUDA_VISIBLE_DEVICES, where
    there may be UUIDs or MIG devices.

    Args:
        ask: DeepSpeed's own function.
    """
    import torch

    try:
        left = int(ask(index))
    except ValueError:
        warn(BY_NAME.format(devices=os.environ.get("CUDA_VISIBLE_DEVICES", "")))
        left, _ = torch.cuda.mem_get_info(index)
    if _limit_bytes is None:
        return left
    return min(left, _limit_bytes - int(accelerator.memory_allocated(index)))


def limit_allocator(limit_bytes: int | None, device: int) -> None:
    """Make the allocator of a CUDA device refuse more than a slot may use."""
    from deepspeed.accelerator import get_accelerator

    if limit_bytes is None or get_accelerator().device_name() != "cuda":
        return
    import torch

    fraction = limit_bytes / get_accelerator().total_memory(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), device)
