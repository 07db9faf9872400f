"""Trials as processes on this machine."""

from dsat.engines.local.engine import LocalEngine, LocalOptions
from dsat.engines.local.hosts import Arrivals, Host, NoArrivals
from dsat.engines.local.machine import (
    Machine,
    MachineLook,
    find_machine,
    find_machine_for_simulations,
    find_machines,
)

__all__ = [
    "Arrivals",
    "Host",
    "LocalEngine",
    "LocalOptions",
    "Machine",
    "MachineLook",
    "NoArrivals",
    "find_machine",
    "find_machine_for_simulations",
    "find_machines",
]
