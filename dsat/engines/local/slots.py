"""Which slots are free, which are broken, and where a trial can be placed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dsat.engines.local.hosts import Host, Share
from dsat.engines.local.machine import problems_with
from dsat.errors import EngineError
from dsat.values.outcome import Outcome, OutcomeKind

# What is worth a look at the device, and not the program's own mistake, as an illegal address is:
# https://docs.nvidia.com/deploy/xid-errors
_MAY_BE_BROKEN = (
    "busy or unavailable",
    "ECC error",
    "hardware stack error",
    "HIP error",
    "launch failure",
    "launch timed out",
    "no CUDA-capable device",
    "NVLink error",
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
    """The slots of hosts that have equally many.

    A trial has slots of one host, or, if it needs more than a host has, whole hosts.

    Args:
        hosts: what there is.
        needed: slots of a trial.
    """

    def __init__(self, hosts: Sequence[Host], needed: int) -> None:
        self._hosts = hosts
        self._needed = needed
        self._per_host = hosts[0].machine.num_slots
        self._free = [set(range(self._per_host)) for _ in hosts]
        self._broken: list[dict[int, str]] = [{} for _ in hosts]
        self._lost: dict[int, str] = {}

    @property
    def usable(self) -> int:
        """How many trials can use at once, of those that are not broken."""
        return self._room([self._working(host) for host in range(len(self._hosts))])

    def check_free(self, *, waiting: int) -> None:
        """Raises EngineError if there is no room for one more trial.

        After a device or a host has failed, trials that were on their way may wait.

        Args:
            waiting: trials that will have slots first.
        """
        free = self._room([len(free) for free in self._free])
        if not self._any_broken and free < self._needed * (waiting + 1):
            raise EngineError(f"a trial needs {self._needed} slots and {free} are free")

    def take(self, *, without: Collection[int] = ()) -> tuple[Share, ...] | None:
        """Free slots for a trial; None as long as there are none.

        They are on the host that has the fewest to spare, so that whole ones stay free.

        Args:
            without: hosts that other trials have for themselves.
        """
        count = min(self._needed, self._per_host)
        fits = [
            host
            for host, free in enumerate(self._free)
            if len(free) >= count and host not in without
        ]
        hosts = -(-self._needed // self._per_host)
        if len(fits) < hosts:
            return None
        fits.sort(key=lambda host: len(self._free[host]))
        shares = tuple(
            Share(host, self._hosts[host], tuple(sorted(self._free[host])[:count]))
            for host in sorted(fits[:hosts])
        )
        for share in shares:
            self._free[share.index].difference_update(share.slots)
        return shares

    def give_back(self, shares: Sequence[Share]) -> None:
        for share in shares:
            if share.index not in self._lost:
                own = set(share.slots) - self._broken[share.index].keys()
                self._free[share.index].update(own)

    def check(
        self, shares: Sequence[Share], outcome: Outcome, *, stuck: Collection[int]
    ) -> list[str]:
        """Takes the slots of a trial out for the rest of the run whose devices no longer work.

        Args:
            shares: of the trial, which has ended.
            outcome: of it, which says whether devices are worth a look.
            stuck: hosts on which one of its ranks cannot be ended.

        Returns:
            A line for people on each slot that was taken out.
        """
        if self._hosts[0].machine.is_cpu or outcome.ok:
            return []
        may_be_broken = outcome.kind is OutcomeKind.TIMEOUT or (
            outcome.kind is OutcomeKind.ERROR
            and any(sign in outcome.message + outcome.detail for sign in _MAY_BE_BROKEN)
        )
        said = []
        for share in shares:
            if share.index in self._lost:
                continue
            if stuck:
                problems = dict.fromkeys(share.slots, _STUCK) if share.index in stuck else {}
            elif may_be_broken:
                problems = problems_with(share.host.machine, share.slots, share.host.prefix)
            else:
                problems = {}
            self._broken[share.index].update(problems)
            self._free[share.index].difference_update(problems)
            said += [
                f"{self._name(share.index, slot)} is not used any more: {problem}"
                for slot, problem in problems.items()
            ]
        return said

    def lose(self, host: int, reason: str) -> str:
        """Takes a host out for the rest of the run.

        Args:
            reason: what became of it.

        Returns:
            A line for people.
        """
        self._lost[host] = reason
        self._free[host].clear()
        name = self._hosts[host].name
        return f"host {name} is not used any more: {reason}" if name else reason

    def check_enough(self) -> None:
        """Raises EngineError if too few are left for a trial."""
        if self.usable >= self._needed:
            return
        if len(self._lost) == len(self._hosts) == 1:
            raise EngineError(f"{self._lost[0]}. Continue with --resume.")
        reasons = [f"host {self._hosts[host].name}: {why}" for host, why in self._lost.items()]
        reasons += [
            f"{self._name(host, slot)}: {reason}"
            for host, broken in enumerate(self._broken)
            for slot, reason in sorted(broken.items())
        ]
        working = sum(self._working(host) for host in range(len(self._hosts)))
        raise EngineError(
            f"a trial needs {self._needed} slots, and {working} of "
            f"{self._per_host * len(self._hosts)} still work ({'; '.join(reasons)}). Continue with "
            "--resume once they do."
        )

    @property
    def _any_broken(self) -> bool:
        return bool(self._lost) or any(self._broken)

    def _working(self, host: int) -> int:
        return 0 if host in self._lost else self._per_host - len(self._broken[host])

    def _room(self, slots: Sequence[int]) -> int:
        """How many of the slots that hosts have are of use to trials at the same time."""
        if self._needed > self._per_host:
            slots = [count for count in slots if count == self._per_host]
            return sum(slots) // self._needed * self._needed
        return sum(count // self._needed * self._needed for count in slots)

    def _name(self, host: int, slot: int) -> str:
        machine, name = self._hosts[host].machine, self._hosts[host].name
        on_host = f" of host {name}" if name else ""
        return f"{machine.accelerator} {machine.devices[slot]}{on_host}"
