"""CPU cores and memory of this host, within the limits of a container or of Slurm.

Sources: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Files of a control group that hold its quota of processor time per period, and the period.
_CPU_V2, _CPU_V1 = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
# Files of a control group that hold its memory limits (beyond `memory.high`, the kernel throttles
# processes) and its usage; and the field of `memory.stat` that counts cached files, which the
# kernel reclaims first.
_MEMORY_V2 = ("memory.max", "memory.high"), "memory.current", "inactive_file"
_MEMORY_V1 = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"


def usable_cores() -> list[int]:
    """Return the hardware threads that this process may use.

    If a quota of processor time allows fewer, return only the first ones.
    """
    threads = sorted(os.sched_getaffinity(0))
    return threads[: max(1, min(_cpu_quotas(), default=len(threads)))]


def total_bytes() -> int:
    """Return the smallest of the host's memory and its limits, in bytes."""
    return min([_meminfo_bytes("MemTotal"), *(limit for limit, _ in _memory_limits())])


def available_bytes() -> int:
    """Return the memory in bytes that this process can allocate without swapping."""
    rooms = [max(0, limit - used) for limit, used in _memory_limits()]
    return min([_meminfo_bytes("MemAvailable"), *rooms])


def _cpu_quotas() -> Iterator[int]:
    """Yield each quota of this process's control groups, in whole cores."""
    for folder, is_v2 in _control_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # `max` means no quota
            texts = [(folder / name).read_text() for name in (_CPU_V2 if is_v2 else _CPU_V1)]
            quota, period = map(int, " ".join(texts).split())
            if quota > 0:
                yield quota // period


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield each limit of this process's control groups, and the group's usage, in bytes.

    Cached files do not count as usage.
    """
    for folder, is_v2 in _control_groups("memory"):
        limits, usage, cache_key = _MEMORY_V2 if is_v2 else _MEMORY_V1
        for limit in limits:
            with contextlib.suppress(OSError, ValueError):  # `max` means no limit
                limit_bytes = int((folder / limit).read_text())
                used_bytes = int((folder / usage).read_text())
                yield limit_bytes, used_bytes - _stat_bytes(folder / "memory.stat", cache_key)


def _meminfo_bytes(name: str) -> int:
    text = (PROC / "meminfo").read_text()
    sizes = dict(line.split(":") for line in text.splitlines())
    return int(sizes[name].split()[0]) * 1024


def _stat_bytes(path: Path, name: str) -> int:
    text = path.read_text() if path.is_file() else ""
    return int(dict(line.split() for line in text.splitlines()).get(name, 0))


def _control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each control group of this process, and whether it is of version 2.

    The process's own group comes first, then the groups above it. `controller` selects one of the
    hierarchies of version 1; version 2 has only one hierarchy.
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
        group = root / path.strip("/")
        # In a container the path may be the host's. Then only the root folder exists.
        for folder in (group, *group.parents):
            yield folder, not controllers
            if folder == root:
                break
