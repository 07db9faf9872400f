"""Logging of slow operations."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

LONG_S = 5.0


@contextlib.contextmanager
def told(log: logging.Logger, what: str) -> Iterator[None]:
    """Log an operation while it runs, if it takes longer than `LONG_S`.

    Args:
        log: where to.
        what: the operation, for people.
    """
    timer = threading.Timer(LONG_S, log.info, ("%s", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
