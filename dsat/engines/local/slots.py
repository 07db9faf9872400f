"""Which slots are free, which are broken, and where a trial can be placed."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

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
    """The slots of hosts that have equally many.

    A trial has slots of one host, or, if it needs more than a host has, whole hosts. To find them
    takes no longer if there are more hosts.

    Args:
        hosts: what there is at first.
        needed: slots of a trial.
    """

    def __init__(self, hosts: Sequence[Host], needed: int) -> None:
        self._hosts = list(hosts)
        self._needed = needed
        self._per_host = hosts[0].machine.num_slots
        self._free = [set(range(self._per_host)) for _ in hosts]
        # Hosts by how many slots they have free, in order.
        self._by_free: list[list[int]] = [[] for _ in range(self._per_host)]
        self._by_free.append(list(range(len(hosts))))
        self._broken: list[dict[int, str]] = [{} for _ in hosts]
        self._lost: dict[int, str] = {}
        self._coming: set[int] = set()
        self._usable = self._room({self._per_host: len(hosts)})

    @property
    def usable(self) -> int:
        """How many trials can use at once, of those that are not broken."""
        return self._usable

    @property
    def broken(self) -> dict[int, set[int]]:
        """Slots that were taken out, by host."""
        return {host: set(slots) for host, slots in enumerate(self._broken)}

    @property
    def any_coming(self) -> bool:
        """Whether there is a host that has come and has yet to get ready."""
        return bool(self._coming)

    def hosts_for(self, trials: int) -> int:
        """How many hosts so many trials need that run side by side."""
        if self._needed > self._per_host:
            return trials * self._needed // self._per_host
        return -(-trials // (self._per_host // self._needed))

    def add(self, host: Host) -> int:
        """Takes in a host that has come; its slots are of use once it is ready.

        Returns:
            Its number among all hosts.
        """
        assert host.machine.num_slots == self._per_host
        number = len(self._hosts)
        self._hosts.append(host)
        self._free.append(set())
        self._by_free[0].append(number)
        self._broken.append({})
        self._coming.add(number)
        return number

    def ready(self, host: int) -> None:
        """The slots of a host that has come can be used."""
        self._coming.remove(host)
        self._set_free(host, set(range(self._per_host)))
        self._count_usable()

    def check_free(self, *, waiting: int) -> None:
        """Raises EngineError if there is no room for one more trial.

        After a device or a host has failed, trials that were on their way may wait.

        Args:
            waiting: trials that will have slots first.
        """
        free = self._room({slots: len(hosts) for slots, hosts in enumerate(self._by_free)})
        if free < self._needed * (waiting + 1) and not self._any_broken:
            raise EngineError(f"a trial needs {self._needed} slots and {free} are free")

    def take(self, *, without: Collection[int] = ()) -> tuple[Share, ...] | None:
        """Free slots for a trial; None as long as there are none.

        They are on the host that has the fewest to spare, so that whole ones stay free.

        Args:
            without: hosts that other trials have for themselves.
        """
        count = min(self._needed, self._per_host)
        hosts = -(-self._needed // self._per_host)
        fits = (
            host
            for free in range(count, self._per_host + 1)
            for host in self._by_free[free]
            if host not in without
        )
        chosen = sorted(itertools.islice(fits, hosts))
        if len(chosen) < hosts:
            return None
        shares = tuple(
            Share(host, self._hosts[host], tuple(sorted(self._free[host])[:count]))
            for host in chosen
        )
        for share in shares:
            self._set_free(share.index, self._free[share.index].difference(share.slots))
        return shares

    def give_back(self, shares: Sequence[Share]) -> None:
        for share in shares:
            if share.index not in self._lost:
                own = set(share.slots) - self._broken[share.index].keys()
                self._set_free(share.index, self._free[share.index] | own)

    def check(
        self,
        shares: Sequence[Share],
        outcome: Outcome,
        *,
        stuck: Mapping[int, Collection[int]],
    ) -> list[str]:
        """Takes the slots of a trial out for the rest of the run whose devices no longer work.

        Args:
            shares: of the trial, which has ended.
            outcome: of it, which says whether devices are worth a look.
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
        said = []
        for share in shares:
            if share.index in self._lost:
                continue
            problems = dict.fromkeys(stuck.get(share.index, ()), _STUCK)
            others = [slot for slot in share.slots if slot not in problems]
            if may_be_broken and others:
                problems |= problems_with(share.host.machine, others, share.host.prefix)
            self._broken[share.index].update(problems)
            self._set_free(share.index, self._free[share.index].difference(problems))
            said += [
                f"{self._name(share.index, slot)} is not used any more: {problem}"
                for slot, problem in problems.items()
            ]
        if said:
            self._count_usable()
        return said

    def lose(self, host: int, reason: str) -> str:
        """Takes a host out for the rest of the run.

        Args:
            reason: what became of it.

        Returns:
            A line for people.
        """
        self._lost[host] = reason
        self._set_free(host, set())
        self._count_usable()
        name = self._hosts[host].name
        how = "is not used" if host in self._coming else "is not used any more"
        self._coming.discard(host)
        return f"host {name} {how}: {reason}" if name else reason

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
        if host in self._lost or host in self._coming:
            return 0
        return self._per_host - len(self._broken[host])

    def _set_free(self, host: int, free: set[int]) -> None:
        alike = self._by_free[len(self._free[host])]
        del alike[bisect.bisect_left(alike, host)]
        self._free[host] = free
        bisect.insort(self._by_free[len(free)], host)

    def _count_usable(self) -> None:
        self._usable = self._room(Counter(map(self._working, range(len(self._hosts)))))

    def _room(self, hosts: Mapping[int, int]) -> int:
        """How many slots are of use to trials at the same time.

        Args:
            hosts: how many there are, by how many slots they have.
        """
        if self._needed > self._per_host:
            return hosts.get(self._per_host, 0) * self._per_host // self._needed * self._needed
        return sum(count * (slots // self._needed * self._needed) for slots, count in hosts.items())

    def _name(self, host: int, slot: int) -> str:
        machine, name = self._hosts[host].machine, self._hosts[host].name
        on_host = f" of host {name}" if name else ""
        return f"{machine.accelerator} {machine.devices[slot]}{on_host}"
