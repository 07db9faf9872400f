"""Interface of the places where hosts come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

from dsat.command.placement import Launch
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import find_machines
from dsat.options import Group, Option


class Environment(NamedTuple):
    """Facts by which a provider detects that dsat runs in its place.

    Attributes:
        variables: environment variables.
        launch: machines that the launcher of the user's command chooses.
    """

    variables: Mapping[str, str]
    launch: Launch = Launch()


class Provider(NamedTuple):
    """A place where hosts come from.

    Attributes:
        detect: returns whether dsat runs in the place.
        acquire: returns a context manager that reserves hosts; the host of this process comes
            first. The second argument has the user's options by keyword. Raises UserInputError if
            these or the environment do not suit the place, EngineError if it provides no hosts.
    """

    detect: Callable[[Environment], bool]
    acquire: Callable[[Environment, Mapping[str, Any]], AbstractContextManager[list[Host]]]
    options: Sequence[Option] = ()


def place_option(flag: str, help: str, **attributes: Any) -> Option:
    """Declare an option of one place; see `Option`."""
    return Option((flag,), help, group=Group.PLACE, **attributes)


def inspect_machines(hosts: Sequence[Host]) -> list[Host]:
    """Inspect the devices of hosts in parallel; return the hosts with their `machine` set."""
    machines = find_machines({host.name: host.reach for host in hosts})
    return [replace(host, machine=machine) for host, machine in zip(hosts, machines, strict=True)]
