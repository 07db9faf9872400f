"""Logging of slow operations."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

LONG_S = 5.0


@contextlib.contextmanager
def logged(log: logging.Logger, operation: str) -> Iterator[None]:
    """Log an operation while it runs, if it takes longer than `LONG_S`."""
    timer = threading.Timer(LONG_S, log.info, ("%s", operation))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
