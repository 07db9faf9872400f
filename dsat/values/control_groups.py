"""Control groups of this process: resource limits set by a container or by Slurm.

Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the groups, from that of this process up to the root.

    Args:
        controller: its name in version 1.

    Yields:
        A folder, and whether it is of version 2.
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
