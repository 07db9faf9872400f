"""This machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsat.engines.local.hosts import Host
from dsat.engines.local.machine import find_machine
from dsat.engines.places.base import Environment, Provider


class ThisMachine(Provider):
    """The machine that dsat runs on, always there."""

    @classmethod
    def detect(cls, environment: Environment) -> bool:
        return True

    def acquire(self, environment: Environment, given: Mapping[str, Any]) -> list[Host]:
        return [Host(find_machine(environment.variables))]
