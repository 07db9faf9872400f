"""Processor cores that the ranks of a trial on accelerators are bound to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def physical_cores() -> list[int]:
    """Return the cores that this process may use, without the further hardware threads of each.

    The DeepSpeed launcher counts cores so (`get_numactl_cmd` of deepspeed/utils/numa.py, 0.19.8):
    two ranks on two threads of one core would slow each other down.
    """
    own = sorted(os.sched_getaffinity(0))
    first_of: dict[str, int] = {}
    for core in own:
        path = _TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list"
        first_of.setdefault(path.read_text() if path.exists() else str(core), core)
    return sorted(first_of.values())


def share_of(cores: Sequence[int], place: int, sharers: int) -> list[int]:
    """Return the cores of one of several ranks; those of neighbours follow each other.

    So a rank's cores are in one NUMA node if there are as many ranks in each, and its memory is
    there as well, since Linux takes it from the node that first touches it.

    Args:
        cores: of the rank's host.
        place: of the rank among those that share them.
        sharers: number of ranks that share them.
    """
    share = max(1, len(cores) // sharers)
    place %= max(1, len(cores) // share)  # more ranks than cores: some share one
    return list(cores[place * share : (place + 1) * share])
