"""Check for machines without any accelerator that does not import torch, which takes seconds.

Each kind needs a driver's library, its device files, or a package that extends torch (deepspeed
0.19.8: accelerator/real_accelerator.py). If any of these exists, only torch and DeepSpeed know.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import sys

_LIBRARIES = ("libcuda.so.1", "libze_loader.so.1")
_FILES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/dxg", "/dev/kfd", "/dev/accel*", "/dev/davinci*")
_PACKAGES = (
    *("habana_frameworks", "intel_extension_for_pytorch", "torch_mlu", "torch_npu"),
    *("torch_sdaa", "torch_supa", "torch_xmlir"),
)


def is_certain() -> bool:
    """Return whether there surely is none."""
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen:
        return chosen == "cpu"
    return (
        sys.platform == "linux"
        and not any(glob.glob(pattern) for pattern in _FILES)
        and not any(importlib.util.find_spec(package) for package in _PACKAGES)
        and not any(_loads(library) for library in _LIBRARIES)
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
