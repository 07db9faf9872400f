"""Logging of slow operations."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

LONG_S, AGAIN_S = 5.0, 30.0


@contextlib.contextmanager
def logged(
    log: logging.Logger,
    operation: str,
    *,
    at_once: bool = False,
    hint: str | Callable[[], str] = "",
) -> Iterator[None]:
    """Log an operation while it runs.

    The first line appears after `LONG_S`, or immediately with `at_once`. Then a line with the
    elapsed time and the hint follows every `AGAIN_S`.
    """
    began_s, end = time.monotonic(), threading.Event()

    def follow() -> None:
        if not at_once:
            if end.wait(LONG_S):
                return
            log.info("%s", operation)
        while not end.wait(AGAIN_S):
            suffix = hint if isinstance(hint, str) else hint()
            log.info("%s: %.0f s so far%s", operation, time.monotonic() - began_s, suffix)

    if at_once:
        log.info("%s", operation)
    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
