"""Trials that have been asked for, and trials that run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsat.engines.local.hosts import Share
from dsat.in_trial.meter_spec import MeterSpec
from dsat.values.trial import Trial

# Of what is no trial of the search.
FULL_RUN_ID = -1
SIMULATION_ID = -3


@dataclass
class Running:
    """A trial that runs.

    Attributes:
        shares: what it has of each host.
        alone: no other trial may run on its hosts.
        again_alone: no other trial may run at all.
        beside: another trial ran at the same time.
        ended: what the supervisors of hosts have said of its ranks' end, by host.
        lost: which host it lost, and how; empty if it has all.
        by_command: the user's whole command runs, and starts the ranks.
    """

    trial: Trial
    folder: Path
    meter: MeterSpec | None
    shares: tuple[Share, ...]
    began_s: float
    cold: bool
    alone: bool = False
    again_alone: bool = False
    beside: bool = False
    swap: list[Path] = field(default_factory=list)
    in_view: bool = False  # in a view of the working folder
    canceled: bool = False
    timed_out: bool = False
    ended: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    lost: str = ""
    by_command: bool = False

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

        All that it has of a host where the user's command cannot be, which starts the ranks.
        """
        found: dict[int, set[int]] = {}
        for share in self.shares:
            by_rank = self.ended[share.index].get("stuck", [])  # a lost host says nothing
            if self.by_command:
                by_rank = by_rank * len(share.slots)
            ranks = zip(share.slots, by_rank, strict=False)
            found[share.index] = {slot for slot, is_stuck in ranks if is_stuck}
        return found

    def by_rank(self, what: str) -> list[Any]:
        """Return what supervisors reported of each rank: `statuses` or `killed`."""
        return [each for share in self.shares for each in self.ended[share.index][what]]


@dataclass(frozen=True)
class Start:
    """A requested start; it may have to wait for slots."""

    trial: Trial
    folder: Path
    meter: MeterSpec | None
    simulation_socket: Path | None
    alone: bool = False  # because it failed beside others
    asked_s: float = field(default_factory=time.monotonic)
