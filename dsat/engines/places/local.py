"""This machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import find_machine
from dsat.engines.places.base import Environment


def detect(environment: Environment) -> bool:
    """Return True: this machine is the last choice."""
    return True


@contextlib.contextmanager
def acquire(environment: Environment, given: Mapping[str, Any]) -> Iterator[list[Host]]:
    """Return the machine that dsat runs on."""
    yield [Host(find_machine(environment.variables))]
