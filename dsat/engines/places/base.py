"""Provider: a place where hosts come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import find_machines
from dsat.options import Group, Option


@dataclass(frozen=True)
class Environment:
    """Facts by which a provider detects that dsat runs in its place.

    Attributes:
        variables: of this process.
        hostfile: machines that the command's launcher is given, with positions of their devices;
            no positions for all.
        ssh_port: of these machines, if the launcher is given one.
        master_address: of the first of them, if the launcher is given one.
    """

    variables: Mapping[str, str]
    hostfile: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ssh_port: int | None = None
    master_address: str = ""


class Provider(NamedTuple):
    """A place where hosts come from.

    Attributes:
        detect: whether `--engine auto` takes this place.
        acquire: reserves hosts for the time of a context; the one that this process runs on comes
            first. Called with the values of the options that the user gave, by keyword. Raises
            UserInputError if dsat cannot be used there like this, EngineError if the place gives
            no hosts.
        options: of its own.
    """

    detect: Callable[[Environment], bool]
    acquire: Callable[[Environment, Mapping[str, Any]], AbstractContextManager[list[Host]]]
    options: Sequence[Option] = ()


def place_option(flag: str, help: str, **attributes: Any) -> Option:
    """An option of one place; see `Option`."""
    return Option((flag,), help, group=Group.PLACE, **attributes)


def inspect_machines(hosts: Sequence[Host]) -> list[Host]:
    """Look at the accelerators of all hosts, at the same time."""
    machines = find_machines({host.name: host.reach for host in hosts})
    return [replace(host, machine=each) for host, each in zip(hosts, machines, strict=True)]
