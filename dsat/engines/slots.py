"""Placement of trials on slots, and a record of lost hosts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dsat.engines.machines.hosts import Host, Share
from dsat.engines.running import Running
from dsat.engines.start import SIMULATION_ID, Start
from dsat.errors import EngineError
from dsat.values import format as fmt


class Slots:
    """Slots of hosts that have equal numbers of slots.

    A trial gets slots of one host, or whole hosts if it needs more.

    Attributes:
        needed: number of slots of a trial.
        lost: for each host that is not used any more, the reason.
    """

    def __init__(self, hosts: Sequence[Host], needed: int) -> None:
        self._hosts = hosts
        self.needed = needed
        self._per_host = hosts[0].machine.num_slots
        self._free = [set(range(self._per_host)) for _ in hosts]
        self.lost: dict[int, str] = {}
        self._new_losses: list[str] = []

    @property
    def usable(self) -> int:
        """Number of slots that trials can use at once, a multiple of `needed`."""
        num_hosts = len(self._hosts) - len(self.lost)
        if self.needed > self._per_host:  # whole hosts
            return num_hosts * self._per_host // self.needed * self.needed
        return num_hosts * (self._per_host // self.needed * self.needed)

    def find_room(
        self, start: Start, running: Collection[Running], *, alone: bool
    ) -> tuple[Share, ...] | None:
        """Reserve slots on the fullest hosts with room; return None if too few slots are free.

        With `alone`, no other trial may run on the trial's hosts. A simulation needs no slots.
        """
        if start.simulation_folder is not None:
            return (Share(0, self._hosts[0], ()),)
        trials = [other for other in running if other.trial.id != SIMULATION_ID]
        if any(other.start.alone for other in trials) or (start.alone and trials):
            return None
        busy = {host for other in trials if alone or other.alone for host in other.hosts}
        count = min(self.needed, self._per_host)
        fitting = [
            host for host, free in enumerate(self._free) if len(free) >= count and host not in busy
        ]
        fitting.sort(key=lambda host: len(self._free[host]))
        hosts = sorted(fitting[: -(-self.needed // self._per_host)])
        if len(hosts) * count < self.needed:
            return None
        shares = tuple(
            Share(host, self._hosts[host], tuple(sorted(self._free[host])[:count]))
            for host in hosts
        )
        for share in shares:
            self._free[share.index] -= set(share.slots)
        return shares

    def give_back(self, shares: Sequence[Share]) -> None:
        for share in shares:
            if share.index not in self.lost:
                self._free[share.index] |= set(share.slots)

    def lose(self, host: int, reason: str) -> str:
        """Remove a host for the rest of the run; return a message about it."""
        self.lost[host] = reason
        self._free[host] = set()
        name = self._hosts[host].name
        self._new_losses.append(f"host {name} is no longer used: {reason}" if name else reason)
        return self._new_losses[-1]

    def pop_losses(self) -> list[str]:
        """Return messages about the hosts that were lost since the last call."""
        losses, self._new_losses = self._new_losses, []
        return losses

    def check_enough(self) -> None:
        """Raise EngineError if too few hosts are left for a trial."""
        if self.usable >= self.needed:
            return
        if len(self.lost) == len(self._hosts) == 1:
            raise EngineError(f"{self.lost[0]}. Continue with --resume.")
        reasons = [f"host {self._hosts[host].name}: {reason}" for host, reason in self.lost.items()]
        num_hosts = len(self._hosts) - len(self.lost)
        raise EngineError(
            f"a trial needs {fmt.count(self.needed, 'device')}, but only "
            f"{num_hosts * self._per_host} of {self._per_host * len(self._hosts)} still work "
            f"({'; '.join(reasons)}). Repair them, then continue with --resume."
        )
