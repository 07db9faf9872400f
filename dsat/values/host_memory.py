"""Memory of this host, within what a container or a job of Slurm's is allowed of it.

Control groups limit it; `/proc/meminfo` is that of the whole host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dsat.values import control_groups
from dsat.values.control_groups import CGROUPS, PROC

# Of both versions: limits (beyond `memory.high` processes hardly go on), usage, and the files in
# memory that are given up first, in `memory.stat`.
_V2 = ("memory.max", "memory.high"), "memory.current", "inactive_file"
_V1 = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"


def total_bytes(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the total memory in bytes."""
    limits = [limit for limit, _ in _limits(proc, cgroups)]
    return min([_of_host("MemTotal", proc), *limits])


def available_bytes(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the memory in bytes that can be allocated without swapping."""
    rooms = [max(0, limit - used) for limit, used in _limits(proc, cgroups)]
    return min([_of_host("MemAvailable", proc), *rooms])


def _of_host(name: str, proc: Path) -> int:
    sizes = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    return int(sizes[name].split()[0]) * 1024


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each control group that this process is in; without limit there is none."""
    for folder, is_v2 in control_groups.folders("memory", proc, cgroups):
        limits, usage, given_up = _V2 if is_v2 else _V1
        for limit in limits:
            with contextlib.suppress(OSError, ValueError):  # `max` is no number
                most = int((folder / limit).read_text())
                used = int((folder / usage).read_text())
                yield most, used - _of_stat(folder / "memory.stat", given_up)


def _of_stat(path: Path, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
