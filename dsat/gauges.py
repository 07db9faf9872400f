"""Clocks and memory gauges of a live training process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from dsat.trial import MemoryUse


class Clock:
    """Marks on the host's clock: right where operations are finished when they return."""

    def mark(self) -> Any:
        return time.perf_counter()

    def ms(self, begin: Any, end: Any) -> float:
        return float(end - begin) * 1e3


class _DeviceClock(Clock):
    """Marks as events on the device's current stream."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def mark(self) -> Any:
        event = self._accelerator.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end))


def clock_for(accelerator: Any) -> Clock:
    if accelerator.is_synchronized_device() or accelerator.Event is None:
        return Clock()
    return _DeviceClock(accelerator)


class MemoryWatch:
    """Peaks of the device's allocator and of the resident set, by phase.

    Args:
        accelerator: DeepSpeed's.
        rss_before_bytes: the resident set when there was no model yet.
    """

    def __init__(self, accelerator: Any, rss_before_bytes: int) -> None:
        self._accelerator = accelerator
        self._rss_before_bytes = rss_before_bytes
        self._has_allocator = not accelerator.is_synchronized_device()
        self._peaks: dict[tuple[str, str], int] = {}

    def reset(self) -> None:
        """Begins a phase."""
        if self._has_allocator:
            self._accelerator.reset_peak_memory_stats()
        # Linux: writing 5 resets the peak resident set (proc(5), /proc/[pid]/clear_refs).
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def note(self, phase: str) -> None:
        """Ends a phase."""
        values = {"host": _peak_rss_bytes()}
        if self._has_allocator:
            values["allocated"] = self._accelerator.max_memory_allocated()
            values["reserved"] = self._accelerator.max_memory_reserved()
        for kind, value in values.items():
            self._peaks[kind, phase] = max(value, self._peaks.get((kind, phase), 0))

    def over_ranks(self, maximum: Callable[[list[float]], list[float]]) -> MemoryUse:
        keys = sorted(self._peaks)
        peaks = [float(self._peaks[key]) for key in keys]
        *peaks, context = maximum([*peaks, float(self._context_bytes())])
        values = dict(zip(keys, peaks, strict=True))

        def by_phase(kind: str) -> dict[str, int]:
            return {phase: int(v) for (k, phase), v in values.items() if k == kind}

        return MemoryUse(
            by_phase("allocated"), by_phase("reserved"), by_phase("host"), int(context)
        )

    def _context_bytes(self) -> int:
        if not self._has_allocator:
            return self._rss_before_bytes
        if self._accelerator.device_name() != "cuda":
            return 0
        import torch

        free, total = torch.cuda.mem_get_info()
        return max(0, total - free - torch.cuda.memory_reserved())


def rss_bytes() -> int:
    """The resident set of this process."""
    return _of_status("VmRSS:")


def _peak_rss_bytes() -> int:
    return _of_status("VmHWM:")


def _of_status(key: str) -> int:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(key):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
