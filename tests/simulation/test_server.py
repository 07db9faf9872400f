"""Limits of a simulation: CPU time and memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from dsat.simulation import server
from dsat.simulation.server import limit_time
from dsat.values import host_limits

GIB = 2**30


def waits() -> None:
    time.sleep(1.5)


def computes() -> None:
    while True:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("work", "status"), [(waits, 0), (computes, -signal.SIGPROF)])
def test_a_simulation_is_limited_by_its_processor_time(
    work: Callable[[], None], status: int
) -> None:
    """On a busy machine it waits longer, which must not end it."""
    child = os.fork()
    if child == 0:
        limit_time(1.0)
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


@pytest.mark.parametrize(("free", "limit"), [(1, 2), (10, 5), (100, 8)])
def test_a_simulation_has_enough_memory_on_a_full_machine(
    monkeypatch: pytest.MonkeyPatch, free: int, limit: int
) -> None:
    """32 billion parameters need 1 GiB of address space, half of which is used."""
    limits: list[int] = []
    monkeypatch.setattr(host_limits, "available_bytes", lambda: free * GIB)
    monkeypatch.setattr(server, "limit_data", limits.append)
    assert server.limit_memory() == limit * GIB
    assert limits == [limit * GIB]
