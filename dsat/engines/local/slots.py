"""Placement of trials: free slots, broken slots, lost hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dsat.engines.local.hosts import Host, Share
from dsat.engines.local.machine import problems_with
from dsat.engines.local.running import SIMULATION_ID, Running, Start
from dsat.errors import EngineError
from dsat.values.outcome import Outcome, OutcomeKind

# Errors that call for a look at the device; an illegal address is the program's own mistake:
# https://docs.nvidia.com/deploy/xid-errors
_MAY_BE_BROKEN = (
    "busy or unavailable",
    "ECC error",
    "hardware stack error",
    "HIP error",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "launch failure",
    "launch timed out",
    "no CUDA-capable device",
    "NVLink error",
    "system not yet initialized",
    "unhandled cuda error",
    "unhandled system error",
    "unknown error",
    "unrecognized error code",
    "Xid",
    "was killed by SIGABRT",
    "was killed by SIGBUS",
)
_STUCK = "a rank waits for the device's driver and cannot be ended"


class Slots:
    """Slots of hosts that have equally many.

    A trial has slots of one host, or, if it needs more than a host has, whole hosts.

    Attributes:
        lost: why hosts are not used any more, by host.
        broken: why slots are not, by slot, of each host.
    """

    def __init__(self, hosts: Sequence[Host], needed: int) -> None:
        self._hosts = hosts
        self._needed = needed
        self._per_host = hosts[0].machine.num_slots
        self._free = [set(range(self._per_host)) for _ in hosts]
        self.broken: list[dict[int, str]] = [{} for _ in hosts]
        self.lost: dict[int, str] = {}

    @property
    def usable(self) -> int:
        """Number of working slots that trials can use at once."""
        return self._room([self._working(host) for host in range(len(self._hosts))])

    def check_free(self, *, waiting: int) -> None:
        """Raise EngineError if there is no room for one more trial.

        After a device or a host has failed, trials that were on their way may wait.
        """
        free = self._room([len(slots) for slots in self._free])
        any_broken = self.lost or any(self.broken)
        if free < self._needed * (waiting + 1) and not any_broken:
            raise EngineError(f"a trial needs {self._needed} slots and {free} are free")

    def find_room(
        self, start: Start, running: Collection[Running], *, alone: bool
    ) -> tuple[Share, ...] | None:
        """Take slots for a trial; None as long as there are none.

        Args:
            start: the trial.
            running: other trials.
            alone: no other trial may run on its hosts.
        """
        if start.simulation_socket is not None:
            return (Share(0, self._hosts[0], ()),)
        trials = [other for other in running if other.trial.id != SIMULATION_ID]
        if any(other.start.alone for other in trials) or (start.alone and trials):
            return None
        taken = {host for other in trials if alone or other.alone for host in other.hosts}
        return self.take(without=taken)

    def take(self, *, without: Collection[int] = ()) -> tuple[Share, ...] | None:
        """Take free slots for a trial, on the hosts with the fewest to spare; None without room."""
        count = min(self._needed, self._per_host)
        fitting = [
            host
            for host, free in enumerate(self._free)
            if len(free) >= count and host not in without
        ]
        fitting.sort(key=lambda host: len(self._free[host]))
        chosen = sorted(fitting[: -(-self._needed // self._per_host)])
        if len(chosen) * count < self._needed:
            return None
        shares = tuple(
            Share(host, self._hosts[host], tuple(sorted(self._free[host])[:count]))
            for host in chosen
        )
        for share in shares:
            self._free[share.index] -= set(share.slots)
        return shares

    def give_back(self, shares: Sequence[Share]) -> None:
        """Free the slots of a trial that ended."""
        for share in shares:
            if share.index not in self.lost:
                self._free[share.index] |= set(share.slots) - self.broken[share.index].keys()

    def check(
        self,
        shares: Sequence[Share],
        outcome: Outcome,
        *,
        stuck: Mapping[int, Collection[int]],
    ) -> list[str]:
        """Take out slots of an ended trial whose devices no longer work, for the rest of the run.

        Args:
            shares: of the trial.
            outcome: of the trial; says whether devices are worth a look.
            stuck: slots whose ranks cannot be ended, by host.

        Returns:
            A line for people on each slot that was taken out.
        """
        if self._hosts[0].machine.is_cpu:
            return []
        may_be_broken = outcome.kind is OutcomeKind.TIMEOUT or (
            outcome.kind is OutcomeKind.ERROR
            and any(sign in outcome.message + outcome.detail for sign in _MAY_BE_BROKEN)
        )
        lines = []
        for share in shares:
            if share.index in self.lost:
                continue
            problems = dict.fromkeys(stuck.get(share.index, ()), _STUCK)
            others = [slot for slot in share.slots if slot not in problems]
            if may_be_broken and others:
                problems |= problems_with(share.host.machine, others, share.host.prefix)
            self.broken[share.index].update(problems)
            self._free[share.index] -= problems.keys()
            lines += [
                f"{self._name(share.index, slot)} is not used any more: {problem}"
                for slot, problem in problems.items()
            ]
        return lines

    def lose(self, host: int, reason: str) -> str:
        """Take a host out for the rest of the run; return a line for people."""
        self.lost[host] = reason
        self._free[host] = set()
        name = self._hosts[host].name
        return f"host {name} is not used any more: {reason}" if name else reason

    def check_enough(self) -> None:
        """Raise EngineError if too few are left for a trial."""
        if self.usable >= self._needed:
            return
        if len(self.lost) == len(self._hosts) == 1:
            raise EngineError(f"{self.lost[0]}. Continue with --resume.")
        reasons = [f"host {self._hosts[host].name}: {why}" for host, why in self.lost.items()]
        reasons += [
            f"{self._name(host, slot)}: {reason}"
            for host, broken in enumerate(self.broken)
            for slot, reason in sorted(broken.items())
        ]
        working = sum(self._working(host) for host in range(len(self._hosts)))
        raise EngineError(
            f"a trial needs {self._needed} slots, and {working} of "
            f"{self._per_host * len(self._hosts)} still work ({'; '.join(reasons)}). Continue with "
            "--resume once they do."
        )

    def _working(self, host: int) -> int:
        return 0 if host in self.lost else self._per_host - len(self.broken[host])

    def _room(self, counts: Sequence[int]) -> int:
        """Return how many slots trials can use at once, of so many on each host."""
        if self._needed > self._per_host:
            whole = sum(count == self._per_host for count in counts)
            return whole * self._per_host // self._needed * self._needed
        return sum(count // self._needed * self._needed for count in counts)

    def _name(self, host: int, slot: int) -> str:
        machine, name = self._hosts[host].machine, self._hosts[host].name
        on_host = f" of host {name}" if name else ""
        return f"{machine.accelerator} {machine.devices[slot]}{on_host}"
