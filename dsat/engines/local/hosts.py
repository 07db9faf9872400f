"""The hosts on which ranks run, and what a trial has of them."""

from __future__ import annotations

from dataclasses import dataclass

from dsat.engines.local.machine import Machine
from dsat.in_trial.loopback import ADDRESS, is_loopback


@dataclass(frozen=True)
class Host:
    """A host on which processes can be started with their three pipes in our hands.

    Attributes:
        machine: its slots.
        name: for people; empty if it is the only one.
        prefix: what goes before a command so that it runs there; nothing where that is here.
        address: by which ranks on other hosts reach it.
        is_here: whether it is the one that this process runs on.
    """

    machine: Machine
    name: str = ""
    prefix: tuple[str, ...] = ()
    address: str = ADDRESS
    is_here: bool = True

    @property
    def is_loopback(self) -> bool:
        """Whether its address is one that no other host can reach."""
        return is_loopback(self.address)


@dataclass(frozen=True)
class Share:
    """What a trial has of a host.

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
