"""Processor cores and memory of this host, within the limits of a container or of Slurm.

Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Processor time allowed to a group per period, and the period.
_CPU_V2, _CPU_V1 = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
# Limits (processes beyond `memory.high` are throttled), usage, and the field of `memory.stat` that
# counts cached files, which the kernel reclaims first.
_MEMORY_V2 = ("memory.max", "memory.high"), "memory.current", "inactive_file"
_MEMORY_V1 = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"


def usable_cores() -> list[int]:
    """Return the hardware threads that this process may use.

    A quota of processor time limits their number; the first ones are returned.
    """
    threads = sorted(os.sched_getaffinity(0))
    return threads[: max(1, min(_cpu_quotas(), default=len(threads)))]


def total_bytes() -> int:
    """Return the total memory in bytes."""
    return min([_meminfo_bytes("MemTotal"), *(limit for limit, _ in _memory_limits())])


def available_bytes() -> int:
    """Return the memory in bytes that can be allocated without swapping."""
    rooms = [max(0, limit - used) for limit, used in _memory_limits()]
    return min([_meminfo_bytes("MemAvailable"), *rooms])


def _cpu_quotas() -> Iterator[int]:
    """Yield the whole cores that each control group may use; none without a limit."""
    for folder, is_v2 in _control_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # `max` is no number
            texts = [(folder / name).read_text() for name in (_CPU_V2 if is_v2 else _CPU_V1)]
            quota, period = map(int, " ".join(texts).split())
            if quota > 0:
                yield quota // period


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and usage of each control group of this process that has a limit."""
    for folder, is_v2 in _control_groups("memory"):
        limits, usage, cached = _MEMORY_V2 if is_v2 else _MEMORY_V1
        for limit in limits:
            with contextlib.suppress(OSError, ValueError):  # `max` is no number
                most = int((folder / limit).read_text())
                used = int((folder / usage).read_text())
                yield most, used - _stat_bytes(folder / "memory.stat", cached)


def _meminfo_bytes(name: str) -> int:
    text = (PROC / "meminfo").read_text()
    sizes = dict(line.split(":") for line in text.splitlines())
    return int(sizes[name].split()[0]) * 1024


def _stat_bytes(path: Path, name: str) -> int:
    text = path.read_text() if path.is_file() else ""
    return int(dict(line.split() for line in text.splitlines()).get(name, 0))


def _control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's groups, from its own up to the root, and whether v2.

    `controller` is its name in version 1.
    """
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = CGROUPS
        elif controller in controllers.split(","):
            root = CGROUPS / controller
        else:
            continue
        own = root / path.strip("/")
        # Within a container the path may be the host's, of which only the root can be seen.
        for folder in (own, *own.parents):
            yield folder, not controllers
            if folder == root:
                break
