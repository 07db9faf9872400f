"""Place: this machine alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import find_machine
from dsat.engines.places.base import Environment


def detect(environment: Environment) -> bool:
    """Return True, as this place is the last choice."""
    return True


@contextlib.contextmanager
def acquire(environment: Environment, given: Mapping[str, Any]) -> Iterator[list[Host]]:
    """Yield the machine that dsat runs on, as a single host."""
    yield [Host(find_machine(environment.variables))]
