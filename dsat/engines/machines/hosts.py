"""Hosts on which ranks run, and the shares of them that trials get."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dsat.engines.machines.machine import Machine
from dsat.engines.machines.processes import Reach
from dsat.in_trial.loopback import ADDRESS

UNSEEN = Machine("", "", (), (), 0)


@dataclass(frozen=True)
class Host:
    """A host on which dsat starts processes, with pipes for their three standard streams.

    Attributes:
        machine: the devices; `UNSEEN` before they are inspected.
        name: name in messages; empty for the machine of `--engine local`.
        reach: how commands run there: words to put before them, such as srun, or a function.
        is_here: whether this process runs on the host.
    """

    machine: Machine = UNSEEN
    name: str = ""
    reach: Reach = ()
    address: str = ADDRESS
    is_here: bool = True


def disable_segments(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return the hosts with expandable segments of torch's allocator disabled in their ranks."""
    return tuple(
        replace(host, machine=replace(host.machine, expandable_segments=False)) for host in hosts
    )


@dataclass(frozen=True)
class Share:
    """Devices of a host that a trial uses.

    Attributes:
        index: position of the host among all hosts.
        slots: positions in `Machine.devices`; empty for simulations and for a first run whose
            command starts the ranks.
    """

    index: int
    host: Host
    slots: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.slots) or 1
