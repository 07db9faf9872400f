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
    """A host on which dsat starts processes, and holds their three pipes.

    Attributes:
        machine: its slots; none before its accelerators are looked at.
        name: for people; empty if it is the only one.
        prefix: words before a command that run it there; none for this machine.
        address: by which ranks on other hosts reach it.
        is_here: whether this process runs on it.
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
        """The runner of commands on the host."""
        return self.call or self.prefix


def disable_segments(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return hosts whose ranks do not use expandable segments of torch's allocator."""
    return tuple(
        replace(host, machine=replace(host.machine, expandable_segments=False)) for host in hosts
    )


@dataclass(frozen=True)
class Share:
    """Slots of a host that a trial gets.

    Attributes:
        index: of the host among all that there are.
        slots: numbers of the host's slots; none if a script is only run for simulations.
    """

    index: int
    host: Host
    slots: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.slots) or 1
