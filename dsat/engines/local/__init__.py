"""Trials as processes on this machine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsat.engines.local.engine import LocalEngine
    from dsat.engines.local.hosts import Host
    from dsat.engines.local.launch import LocalOptions
    from dsat.engines.local.machine import (
        Machine,
        find_machine,
        find_machine_for_simulations,
        find_machines,
    )

# Imported when they are used: the command line needs only a few of them to show its help.
_MODULES = {
    "Host": "hosts",
    "LocalEngine": "engine",
    "LocalOptions": "launch",
    "Machine": "machine",
    "find_machine": "machine",
    "find_machine_for_simulations": "machine",
    "find_machines": "machine",
}

__all__ = [
    "Host",
    "LocalEngine",
    "LocalOptions",
    "Machine",
    "find_machine",
    "find_machine_for_simulations",
    "find_machines",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
