"""Running trials: their state, time limits, and log of slow activities."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsat.engines.machines.hosts import Share
from dsat.engines.start import FULL_RUN_ID, SIMULATION_ID, Start, StartMethod
from dsat.engines.supervisors import PING_EVERY_S
from dsat.in_trial.rank_files import ACTIVITY_FILE
from dsat.values import slow
from dsat.values.trial import Trial

_log = logging.getLogger(__name__)


@dataclass
class Running:
    """A running trial.

    Attributes:
        shares: devices of the trial on each host, in the order of its ranks.
        method: method by which its ranks were started.
        alone: whether its hosts must not run another trial.
        counted_s: seconds counted against the time limit until the time `read_s`.
        beside: whether another trial or a simulation ran at the same time.
        ended: the supervisors' "ended" messages, by host.
        lost: message about the host whose loss ended the trial; empty if none.
    """

    start: Start
    shares: tuple[Share, ...]
    method: StartMethod
    alone: bool = False
    began_s: float = field(default_factory=time.monotonic)
    counted_s: float = 0.0
    read_s: float = field(default_factory=time.monotonic)
    beside: bool = False
    canceled: bool = False
    timed_out: bool = False
    ended: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    lost: str = ""

    @property
    def trial(self) -> Trial:
        return self.start.trial

    @property
    def folder(self) -> Path:
        return self.start.folder

    @property
    def hosts(self) -> set[int]:
        return {share.index for share in self.shares}

    @property
    def running_hosts(self) -> set[int]:
        return self.hosts - self.ended.keys()

    def count_s(self) -> float:
        """Add the time since the last call, at most 20 s (dsat may be stopped); return the sum."""
        read_s = time.monotonic()
        self.counted_s += min(read_s - self.read_s, 2 * PING_EVERY_S)
        self.read_s = read_s
        return self.counted_s

    def collect_by_rank(self, key: str) -> list[Any]:
        """Return what supervisors reported for each rank: `statuses` or `killed`."""
        return [value for share in self.shares for value in self.ended[share.index][key]]


def find_overdue(running: Collection[Running], limit_s: float) -> tuple[list[Running], float]:
    """Mark and return overdue trials; also return the seconds until the next one is overdue."""
    overdue, left_s = [], [math.inf]
    for entry in running:
        if entry.timed_out or entry.trial.id in (FULL_RUN_ID, SIMULATION_ID):
            continue
        left_s.append(limit_s - entry.count_s())
        if left_s[-1] <= 0:
            entry.timed_out = True
            overdue.append(entry)
            left_s.pop()
    return overdue, min(left_s)


def log_activities(running: Collection[Running], next_s: dict[str, float]) -> None:
    """Log trials' activities once they have lasted 5 s, and again every 30 s.

    `next_s`, which is updated, maps an activity to the seconds after which it is logged again.
    """
    for entry in running:
        path = entry.folder / ACTIVITY_FILE
        with contextlib.suppress(OSError):
            duration_s = time.time() - path.stat().st_mtime
            # The user's own command, which begins the run, has no name.
            name = "" if entry.start.is_own else f"{entry.trial.name}: "
            text = f"{name}{path.read_text()}"
            if duration_s > next_s.get(text, slow.LONG_S):
                elapsed = f": {duration_s:.0f} s so far" if text in next_s else ""
                _log.info("%s%s", text, elapsed)
                next_s[text] = duration_s + slow.AGAIN_S
