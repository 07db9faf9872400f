"""Limit of BLAS to one thread.

The matrices of a search are small, so BLAS threads mostly wait for each other. They wait in busy
loops, on the cores where trials are measured.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy  # noqa: F401  (loads the BLAS that ThreadpoolController finds)

try:
    from threadpoolctl import ThreadpoolController
except ImportError:  # in the container of a cluster's search runner, where no trial runs
    _libraries: Any = None
else:
    _libraries = ThreadpoolController()

_one_at_a_time = threading.RLock()  # the limit applies to the whole process


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit the BLAS of this process to one thread; without threadpoolctl, do nothing."""
    with _one_at_a_time, contextlib.ExitStack() as stack:
        if _libraries is not None:
            stack.enter_context(_libraries.limit(limits=1, user_api="blas"))
        yield
