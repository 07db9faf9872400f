"""Control groups of this process: what a container or a job of Slurm's is allowed of its host.

Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the groups, from this process's own up to the root.

    Args:
        controller: its name in the first version.

    Yields:
        A folder, and whether its files are those of the second version.
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
