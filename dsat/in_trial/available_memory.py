"""Limits on a device's memory, and the free memory that DeepSpeed sees.

By that, ZeRO decides whether parameters are flattened on the device or on the host
(`available_memory` in deepspeed/runtime/zero/stage_1_and_2.py, 0.19.8).
"""

from __future__ import annotations

import os
from collections.abc import Callable

BY_NAME = (
    "DeepSpeed does not understand CUDA_VISIBLE_DEVICES={devices} while pynvml is installed, and "
    "fails when you train: give the GPUs by number, or uninstall pynvml (nvidia-ml-py)"
)


def adapt(limit_bytes: int | None, warn: Callable[[str], None]) -> None:
    """Make the answer hold for a device that is named, and for a limit; on CUDA devices only.

    With pynvml DeepSpeed asks NVML, by a number that it reads from CUDA_VISIBLE_DEVICES, where
    there may be UUIDs or MIG devices.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() != "cuda":
        return
    ask = accelerator.available_memory

    def available_memory(device_index: int | None = None) -> int:
        import torch

        try:
            left = int(ask(device_index))
        except ValueError:
            warn(BY_NAME.format(devices=os.environ.get("CUDA_VISIBLE_DEVICES", "")))
            left, _ = torch.cuda.mem_get_info(device_index)
        if limit_bytes is None:
            return left
        return min(left, limit_bytes - int(accelerator.memory_allocated(device_index)))

    accelerator.available_memory = available_memory


def limit_allocator(limit_bytes: int | None, device: int) -> None:
    """Make the allocator of a CUDA device refuse more than a slot may use."""
    from deepspeed.accelerator import get_accelerator

    if limit_bytes is None or get_accelerator().device_name() != "cuda":
        return
    import torch

    fraction = limit_bytes / get_accelerator().total_memory(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), device)
