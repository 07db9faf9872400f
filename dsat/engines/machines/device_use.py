"""Memory in use of NVIDIA's devices as their driver tells it, without a process that uses CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os

_LIBRARY = "libnvidia-ml.so.1"
_VARIABLE = "DSAT_MEMORY_IN_USE"
_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong)]
    _fields_ += [("used", ctypes.c_ulonglong)]


def variables_of_memory_in_use() -> dict[str, str]:
    """Return variables that tell later processes how much memory is in use now."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, AttributeError):  # no such library or function
        library = ctypes.CDLL(_LIBRARY)
        count = ctypes.c_uint()
        if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return {}
        for index in range(count.value):
            handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
            memory = _Memory()
            failed = (
                library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
                or library.nvmlDeviceGetUUID(handle, name, _UUID_BYTES)
                or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
            )
            if not failed:
                found[name.value.decode()] = memory.used
    return {_VARIABLE: json.dumps(found)} if found else {}


def used_bytes(uuid: str) -> int | None:
    """Return the bytes of a device that were in use by those variables; None without them."""
    taken: int | None = json.loads(os.environ.get(_VARIABLE, "{}")).get(uuid)
    return taken
