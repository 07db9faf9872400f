"""Clocks and memory gauges of a live training process."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from dsat.values.outcome import MemoryUse


class Clock:
    """Clock of the host, for devices that execute operations synchronously."""

    def mark(self) -> Any:
        return time.perf_counter()

    def ms(self, begin: Any, end: Any) -> float:
        return float(end - begin) * 1e3


class DeviceClock(Clock):
    """Clock of the device, whose marks are events on the current stream."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def mark(self) -> Any:
        event = self._accelerator.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end))


_BACK_WITHIN_S = 20.0  # longest wait for the driver to free the memory of a killed process
_UNCHANGED_FOR_S = 3.0
_POLL_S = 0.1
_MAY_BE_HELD = 0.1  # fraction of a device's memory that contexts and the like may hold


def wait_for_memory(accelerator: Any, index: int) -> None:
    """Wait until the driver has freed a CUDA device's memory after processes ended.

    Give up after 3 s without a change (another program holds the memory), or after 20 s.
    """
    if accelerator.device_name() != "cuda":
        return
    import torch

    began_s = last_change_s = time.monotonic()
    last_free = 0
    while (now_s := time.monotonic()) - began_s < _BACK_WITHIN_S:
        try:
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError:  # there is not even memory for a context
            time.sleep(_POLL_S)
            continue
        other_bytes = total - free - torch.cuda.memory_reserved(index)
        if other_bytes < _MAY_BE_HELD * total or now_s - last_change_s > _UNCHANGED_FOR_S:
            return
        if free != last_free:
            last_free, last_change_s = free, now_s
        time.sleep(_POLL_S)


def limit_allocator(accelerator: Any, limit_bytes: int | None, index: int) -> None:
    """Make the allocator of a CUDA device refuse to exceed a limit."""
    if limit_bytes is None or accelerator.device_name() != "cuda":
        return
    import torch

    fraction = limit_bytes / accelerator.total_memory(index)
    torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), index)


class MemoryWatch:
    """Recorder of peak memory by phase: of the device's allocator and of the resident set.

    Attributes:
        has_allocator: whether the device is asynchronous and has separate memory.
        counts_data: whether allocations on CPU cores count against a memory limit.
    """

    counts_data: ClassVar[bool] = False

    def __init__(self, accelerator: Any, memory_before: ProcessMemory) -> None:
        self._accelerator = accelerator
        self._memory_before = memory_before
        self.has_allocator = not accelerator.is_synchronized_device()
        self._peaks: dict[tuple[str, str], int] = {}  # by field of `MemoryUse` and phase

    def reset(self) -> None:
        """Reset the peaks at the start of a phase."""
        if self.has_allocator:
            self._accelerator.reset_peak_memory_stats()
        # Linux: writing 5 resets the peak resident set (proc(5), /proc/[pid]/clear_refs).
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def note(self, phase: str) -> None:
        """Record the peaks at the end of a phase."""
        for kind, value in self._read().items():
            self._peaks[kind, phase] = max(value, self._peaks.get((kind, phase), 0))

    def note_measured_steps(self) -> None:
        """Raise the largest phase's peak to the measured steps' peak, whose phase is unknown."""
        for kind, value in self._read().items():
            peaks = {key: peak for key, peak in self._peaks.items() if key[0] == kind}
            largest = max(peaks, key=lambda key: peaks[key])
            self._peaks[largest] = max(value, self._peaks[largest])

    def _read(self) -> dict[str, int]:
        values = {"host_rss_bytes": _read_status("VmHWM:")}
        if self.has_allocator:
            values["allocated_bytes"] = self._accelerator.max_memory_allocated()
            values["reserved_bytes"] = self._accelerator.max_memory_reserved()
        return values

    def over_ranks(self, maximum: Callable[[list[float]], list[float]]) -> MemoryUse:
        """Return the maxima over the ranks, in bytes; a collective call."""
        keys = sorted(self._peaks)
        values = [*(self._peaks[key] for key in keys), self._context_bytes(), self._data_bytes()]
        *peaks, context, data = map(int, maximum(list(map(float, values))))
        fields: dict[str, Any] = {}
        for (kind, phase), peak in zip(keys, peaks, strict=True):
            fields.setdefault(kind, {})[phase] = peak
        return MemoryUse(**fields, context_bytes=context, data_bytes=data)

    def _data_bytes(self) -> int:
        if self.has_allocator or not self.counts_data:
            return 0
        # The kernel records only the peak of all mappings.
        peak = _read_status("VmPeak:") - _read_status("VmSize:") + _read_status("VmData:")
        return max(0, peak - self._memory_before.data_bytes)

    def _context_bytes(self) -> int:
        if not self.has_allocator:
            return self._memory_before.rss_bytes
        if self._accelerator.device_name() != "cuda":
            return 0
        import torch

        free, total = torch.cuda.mem_get_info()
        return max(0, total - free - torch.cuda.memory_reserved())


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of this process at one moment.

    Attributes:
        data_bytes: the data segment, which `RLIMIT_DATA` limits: private writable mappings.
    """

    rss_bytes: int
    data_bytes: int

    @classmethod
    def now(cls) -> ProcessMemory:
        return cls(_read_status("VmRSS:"), _read_status("VmData:"))


def _read_status(key: str) -> int:
    """Return a size from /proc/self/status in bytes; without `key`, the peak resident set."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
