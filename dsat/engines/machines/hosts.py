"""Hosts on which ranks run, and the shares of them that trials get."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from dsat.engines.machines.machine import Machine
from dsat.engines.machines.processes import Reach
from dsat.in_trial.loopback import ADDRESS

UNSEEN = Machine("", "", (), (), 0)


@dataclass(frozen=True)
class Host:
    """A host on which dsat starts processes through three pipes.

    Attributes:
        machine: its devices; none before they are inspected.
        name: for people; empty if it is the only one.
        prefix: words before a command that run it there; empty for this machine.
        call: calls that run a command there, see `Reach`; None where the prefix does.
    """

    machine: Machine = UNSEEN
    name: str = ""
    prefix: tuple[str, ...] = ()
    address: str = ADDRESS
    is_here: bool = True
    call: Callable[..., Any] | None = None

    @property
    def reach(self) -> Reach:
        return self.call or self.prefix


def disable_segments(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return hosts whose ranks do without expandable segments of torch's allocator."""
    return tuple(
        replace(host, machine=replace(host.machine, expandable_segments=False)) for host in hosts
    )


@dataclass(frozen=True)
class Share:
    """Devices of a host that a trial uses.

    Attributes:
        index: position of the host among all hosts.
        slots: numbers of the devices; none if a script only runs for simulations.
    """

    index: int
    host: Host
    slots: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.slots) or 1
