"""Running trials: their state, time limits, and log of slow activities."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping
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


class ListeningClock:
    """Clock that skips times when dsat was stopped or busy: a reading adds at most 20 s."""

    def __init__(self) -> None:
        self._read_s = time.monotonic()
        self._now_s = 0.0

    def now_s(self) -> float:
        read_s = time.monotonic()
        self._now_s += min(read_s - self._read_s, 2 * PING_EVERY_S)
        self._read_s = read_s
        return self._now_s


@dataclass
class Running:
    """A running trial.

    Attributes:
        shares: devices of the trial on each host, in the order of its ranks.
        method: method by which its ranks were started.
        alone: whether its hosts must not run another trial.
        clock: time that counts against its limit.
        beside: whether another trial or a simulation ran at the same time.
        ended: messages "ended" of supervisors, by host.
        lost: message about the host whose loss ended the trial; empty if none.
    """

    start: Start
    shares: tuple[Share, ...]
    method: StartMethod
    alone: bool = False
    began_s: float = field(default_factory=time.monotonic)
    clock: ListeningClock = field(default_factory=ListeningClock)
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

    def collect_by_rank(self, what: str) -> list[Any]:
        """Return what supervisors reported for each rank: `statuses` or `killed`."""
        return [each for share in self.shares for each in self.ended[share.index][what]]


def find_overdue(running: Collection[Running], limit_s: float) -> tuple[list[Running], float]:
    """Mark and return overdue trials; also return the seconds until the next one is overdue."""
    overdue, left_s = [], [math.inf]
    for each in running:
        if each.timed_out or each.trial.id in (FULL_RUN_ID, SIMULATION_ID):
            continue
        left_s.append(limit_s - each.clock.now_s())
        if left_s[-1] <= 0:
            each.timed_out = True
            overdue.append(each)
            left_s.pop()
    return overdue, min(left_s)


class ActivityLog:
    """Log of slow activities of trials, with the elapsed time."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}  # by text: duration at which it is logged again

    def write(self, running: Collection[Running]) -> None:
        """Log activities that have lasted 5 s, and again every 30 s."""
        for name, activity, duration_s in _slow_activities(running):
            text = f"{name}: {activity}" if name else activity
            if text not in self._next_s:
                _log.info("%s", text)
                self._next_s[text] = duration_s + slow.AGAIN_S
            elif duration_s >= self._next_s[text]:
                _log.info("%s: %.0f s so far", text, duration_s)
                self._next_s[text] = duration_s + slow.AGAIN_S


def _slow_activities(running: Collection[Running]) -> Iterator[tuple[str, str, float]]:
    """Yield the trial's name, text and duration in seconds of each activity that lasts long.

    The name is empty for the user's own command, which begins the run.
    """
    for each in running:
        path = each.folder / ACTIVITY_FILE
        with contextlib.suppress(OSError):
            duration_s = time.time() - path.stat().st_mtime
            if duration_s > slow.LONG_S:
                yield "" if each.start.is_own else each.trial.name, path.read_text(), duration_s
