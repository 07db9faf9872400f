"""Effects that the pure cluster asks its driver for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from testing.master.allocation import Allocation


@dataclass(frozen=True)
class StartContainers:
    """Starts the containers of an allocation that got its slots."""

    allocation: Allocation


@dataclass(frozen=True)
class KillContainers:
    """Kills all processes of an allocation."""

    allocation: Allocation


@dataclass(frozen=True)
class Later:
    """Calls something after a delay."""

    delay_s: float
    call: Callable[[], None]


Effect = StartContainers | KillContainers | Later
