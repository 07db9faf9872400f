"""Memory of this host, within what a container or a job of Slurm's is allowed of it.

Control groups limit it (Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst);
`/proc/meminfo` is that of the whole host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Of both versions: limit, usage, and the files in memory that are given up first, in `memory.stat`.
_V2 = "memory.max", "memory.current", "inactive_file"
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def total_bytes(*, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the total memory in bytes."""
    limits = [limit for limit, _ in _limits(proc, cgroups)]
    return min([_of_host("MemTotal", proc), *limits])


def available_bytes(*, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return the memory in bytes that can be allocated without swapping."""
    rooms = [max(0, limit - used) for limit, used in _limits(proc, cgroups)]
    return min([_of_host("MemAvailable", proc), *rooms])


def _of_host(name: str, proc: Path) -> int:
    sizes = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    return int(sizes[name].split()[0]) * 1024


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each control group that this process is in; without limit there is none."""
    for folder, (limit, usage, given_up) in _groups(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):  # `max` is no number
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            yield most, used - _of_stat(folder / "memory.stat", given_up)


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folders of this process's groups, from its own up to the root, with their files."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _V1
        else:
            continue
        own = root / path.strip("/")
        # Within a container the path may be the host's, of which only the root can be seen.
        for folder in (own, *own.parents):
            yield folder, names
            if folder == root:
                break


def _of_stat(path: Path, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
