"""Limits of a simulation."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from dsat.simulation.server import limit_time


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
    """A machine on which others compute makes it wait, and does not end it."""
    child = os.fork()
    if child == 0:
        limit_time(1.0)
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
