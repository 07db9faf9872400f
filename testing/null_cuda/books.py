"""The state of the null CUDA's devices ("the books"), in a file that tests make, read and
change."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testing.null_cuda.build import Libraries

_MAX_DEVICES, _MAX_ENTRIES, _MAX_FAULTS = 16, 512, 16
_GIB = 2**30


class _Device(ctypes.Structure):
    _fields_ = (
        ("total_bytes", ctypes.c_uint64),
        ("busy_bytes", ctypes.c_uint64),
        ("error", ctypes.c_uint64),
        ("uuid", ctypes.c_char * 64),
        ("name", ctypes.c_char * 64),
    )


class _Entry(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_int64),
        ("device", ctypes.c_int64),
        ("bytes", ctypes.c_uint64),
        ("gone_at_ms", ctypes.c_uint64),
    )


class _Books(ctypes.Structure):
    _fields_ = (
        ("devices", ctypes.c_uint64),
        ("context_bytes", ctypes.c_uint64),
        ("reclaim_ms", ctypes.c_uint64),
        ("fired", ctypes.c_uint64 * _MAX_FAULTS),
        ("device", _Device * _MAX_DEVICES),
        ("entry", _Entry * _MAX_ENTRIES),
    )


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        total_bytes: its memory.
        busy_bytes: the part of it that a process outside of the test holds.
        uuid: `GPU-...`, or `MIG-...` for a part of a device; by default made from its number.
        name: the device's name.
    """

    total_bytes: int = 8 * _GIB
    busy_bytes: int = 0
    uuid: str = ""
    name: str = "Null H100"


class NullCuda:
    """A machine with devices that count memory but compute nothing.

    Args:
        libraries: the compiled null CUDA.
        path: the file with the devices' state.
        devices: the devices of the machine.
        nvml: whether the management library is installed.
        context_bytes: memory that a process needs on each device that it uses, without tensors.
        reclaim_s: time from the end of a process until its memory is free.
    """

    def __init__(
        self,
        libraries: Libraries,
        path: Path,
        devices: Sequence[Device] = (Device(),),
        *,
        nvml: bool = True,
        context_bytes: int = 64 * 2**20,
        reclaim_s: float = 0.0,
    ) -> None:
        self._libraries = libraries
        self._path = path
        self._nvml = nvml
        path.write_bytes(bytes(ctypes.sizeof(_Books)))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._books = _Books.from_buffer(self._map)
        self._books.devices = len(devices)
        self._books.context_bytes = context_bytes
        self._books.reclaim_ms = int(reclaim_s * 1000)
        for index, device in enumerate(devices):
            entry = self._books.device[index]
            entry.total_bytes, entry.busy_bytes = device.total_bytes, device.busy_bytes
            uuid = device.uuid or f"GPU-{index:08x}-0000-0000-0000-000000000000"
            entry.uuid, entry.name = uuid.encode(), device.name.encode()

    def environment(self, faults: str = "", **variables: str) -> dict[str, str]:
        """Return all variables of a process that uses the devices.

        Args:
            faults: rules, separated by `;`: `CALL#N=WHAT` (the N-th call in a process and all later
                ones fail) or `CALL>BYTES=WHAT` (a call fails if the process would then hold more).
                `@D` after the rule limits it to device D, and `*T` to its first T times in all
                processes. WHAT is an error number, `hang` or `abort`.
            variables: further variables.
        """
        env = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "NULL_CUDA_"))}
        return {
            **env,
            **loading(self._libraries, nvml=self._nvml),
            "NULL_CUDA_BOOKS": str(self._path.resolve()),
            "NULL_CUDA_FAULTS": faults,
            **variables,
        }

    def break_device(self, index: int, error: int) -> None:
        """Make every later call on a device fail, as after an Xid; error 0 repairs the device."""
        self._books.device[index].error = error

    def use(self, index: int, busy_bytes: int) -> None:
        """Let a process outside of the test hold `busy_bytes` of a device from now on."""
        self._books.device[index].busy_bytes = busy_bytes

    def uuid(self, index: int) -> str:
        """Return the UUID of a device, as in NVML and CUDA_VISIBLE_DEVICES."""
        return bytes(self._books.device[index].uuid).decode()

    def held(self) -> Mapping[tuple[int, int], int]:
        """Return the bytes that living processes hold, by pid and device."""
        return {
            (entry.pid, entry.device): entry.bytes
            for entry in self._books.entry
            if entry.pid and entry.bytes and os.path.exists(f"/proc/{entry.pid}")
        }


def loading(libraries: Libraries, *, nvml: bool = True) -> dict[str, str]:
    """Return the variables with which a process loads the null CUDA, without any devices.

    The devices follow from NULL_CUDA_BOOKS, which is read at their first use, also in a fork.
    """
    folders = [libraries.driver, *([libraries.nvml] if nvml else [])]
    before = os.environ.get("LD_LIBRARY_PATH")
    return {
        "LD_PRELOAD": str(libraries.preload),
        "LD_LIBRARY_PATH": os.pathsep.join([*map(str, folders), *([before] if before else [])]),
        # The older interface of cuDNN only asks what can be answered without a device.
        "TORCH_CUDNN_V8_API_DISABLED": "1",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
    }
