"""CPU cores of this host, within the limits of a container."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from dsat.values import control_groups

# Processor time allowed to a group per period, and the period.
_V2, _V1 = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def usable() -> list[int]:
    """Return the hardware threads that this process may use.

    A quota of processor time limits their number; the first ones are returned.
    """
    threads = sorted(os.sched_getaffinity(0))
    return threads[: max(1, min(_quotas(), default=len(threads)))]


def _quotas() -> Iterator[int]:
    """Yield the whole cores that each control group may use; none without a limit."""
    for folder, is_v2 in control_groups.folders("cpu"):
        with contextlib.suppress(OSError, ValueError):  # `max` is no number
            texts = [(folder / name).read_text() for name in (_V2 if is_v2 else _V1)]
            quota, period = map(int, " ".join(texts).split())
            if quota > 0:
                yield quota // period
