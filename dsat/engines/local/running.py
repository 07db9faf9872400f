"""Requested trials and running trials."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsat.engines.local.heartbeats import PING_EVERY_S, ListeningClock
from dsat.engines.local.hosts import Share
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.rank_files import ACTIVITY_FILE
from dsat.values import slow
from dsat.values.trial import Trial

# Of what is no trial of the search.
FULL_RUN_ID = -1
SIMULATION_ID = -3


class Way(enum.Enum):
    """Ways to start ranks."""

    FORKED = "forked from the supervisor"
    FRESH = "the same program in fresh processes, where forks fail"
    COMMAND = "the user's command again"


@dataclass(frozen=True)
class Start:
    """A requested start; it may have to wait for slots.

    Attributes:
        meter: what is measured; None in a run that is not.
        simulation_socket: where simulations of the script are asked for, if they are.
        alone: no other trial may run at all, because it failed beside others.
        asked_s: when it was requested, by the monotonic clock.
    """

    trial: Trial
    folder: Path
    meter: MeterSpec | None
    simulation_socket: Path | None = None
    alone: bool = False
    asked_s: float = field(default_factory=time.monotonic)


@dataclass
class Running:
    """A trial that runs.

    Attributes:
        shares: its slots of each host.
        way: in which its ranks were started.
        alone: no other trial may run on its hosts.
        swap: its folders on NVMe, to be removed afterwards.
        clock: its time limit counts by it.
        beside: another trial ran at the same time.
        ended: what the supervisors of hosts reported of its ranks' end, by host.
        lost: which host it lost, and how; empty if it has all.
    """

    start: Start
    shares: tuple[Share, ...]
    way: Way
    alone: bool = False
    swap: list[Path] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    clock: ListeningClock = field(default_factory=lambda: ListeningClock(2 * PING_EVERY_S))
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
    def hosts_going_on(self) -> set[int]:
        """Hosts on which its ranks run."""
        return self.hosts - self.ended.keys()

    @property
    def stuck(self) -> dict[int, set[int]]:
        """Slots whose ranks cannot be ended, by host.

        All of its slots on a host where the user's command, which starts the ranks, is stuck.
        """
        found: dict[int, set[int]] = {}
        for share in self.shares:
            by_rank = self.ended[share.index].get("stuck", [])  # a lost host reports nothing
            if len(by_rank) == 1:
                by_rank = by_rank * len(share.slots)
            ranks = zip(share.slots, by_rank, strict=False)
            found[share.index] = {slot for slot, is_stuck in ranks if is_stuck}
        return found

    def by_rank(self, what: str) -> list[Any]:
        """Return what supervisors reported of each rank: `statuses` or `killed`."""
        return [each for share in self.shares for each in self.ended[share.index][what]]


def slow_activities(
    running: Collection[Running], waiting: Sequence[Start]
) -> Iterator[tuple[str, str]]:
    """Yield what trials have been doing for more than a moment, with their names."""
    for each in running:
        path = each.folder / ACTIVITY_FILE
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > slow.LONG_S:
                yield each.trial.name, path.read_text()
    for start in waiting:
        if time.monotonic() - start.asked_s > slow.LONG_S:
            names = ", ".join(each.trial.name for each in running)
            yield start.trial.name, f"waits for {names} to end"
