"""Memory of this host, within the limits of a container or of Slurm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dsat.values import control_groups

# Limits (processes beyond `memory.high` are throttled), usage, and the field of `memory.stat` that
# counts cached files, which the kernel reclaims first.
_V2 = ("memory.max", "memory.high"), "memory.current", "inactive_file"
_V1 = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"


def total_bytes() -> int:
    """Return the total memory in bytes."""
    return min([_meminfo_bytes("MemTotal"), *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """Return the memory in bytes that can be allocated without swapping."""
    rooms = [max(0, limit - used) for limit, used in _limits()]
    return min([_meminfo_bytes("MemAvailable"), *rooms])


def _meminfo_bytes(name: str) -> int:
    text = (control_groups.PROC / "meminfo").read_text()
    sizes = dict(line.split(":") for line in text.splitlines())
    return int(sizes[name].split()[0]) * 1024


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and usage of each control group of this process that has a limit."""
    for folder, is_v2 in control_groups.folders("memory"):
        limits, usage, given_up = _V2 if is_v2 else _V1
        for limit in limits:
            with contextlib.suppress(OSError, ValueError):  # `max` is no number
                most = int((folder / limit).read_text())
                used = int((folder / usage).read_text())
                yield most, used - _stat_bytes(folder / "memory.stat", given_up)


def _stat_bytes(path: Path, name: str) -> int:
    text = path.read_text() if path.is_file() else ""
    return int(dict(line.split() for line in text.splitlines()).get(name, 0))
