"""Trials as processes on this machine."""

from dsat.engines.local.engine import LocalEngine, LocalOptions
from dsat.engines.local.hosts import Host
from dsat.engines.local.machine import (
    Machine,
    find_machine,
    find_machine_for_simulations,
    find_machines,
)

__all__ = [
    "Host",
    "LocalEngine",
    "LocalOptions",
    "Machine",
    "find_machine",
    "find_machine_for_simulations",
    "find_machines",
]
