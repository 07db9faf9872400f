"""What the simulation's server makes of what its children say."""

from __future__ import annotations

import os
from typing import Any

import pytest

from dsat.in_trial.simulation.server import _ABORTED, _Child

_LOST = b'{"failed": "SystemError: <built-in method> returned NULL without setting an exception"}\n'
_RAISED = b'{"failed": "RuntimeError: use engine.backward(loss)"}\n'


@pytest.mark.parametrize(
    ("is_traced", "said", "failed"),
    [
        (False, _RAISED, "RuntimeError: use engine.backward(loss)"),
        (False, _LOST, None),  # again, with a trace
        (True, _RAISED + _LOST, "RuntimeError: use engine.backward(loss)"),
        (True, _LOST, "SystemError: <built-in method> returned NULL without setting an exception"),
    ],
)
def test_an_exception_that_autograd_lost_is_looked_for(
    is_traced: bool, said: bytes, failed: str | None
) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    reader, writer = os.pipe()
    os.close(writer)
    candidate: dict[str, Any] = {"number": 3, "timeout_s": 60, _ABORTED: is_traced}
    answer = _Child(candidate, pid, reader, said).answer()
    assert answer == (None if failed is None else {"failed": failed, "number": 3})
