"""What takes more than a moment is told of."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

LONG_S = 5.0


@contextlib.contextmanager
def told(log: logging.Logger, what: str) -> Iterator[None]:
    """Logs what is being done if it takes longer than `LONG_S`, while it is being done.

    Args:
        log: where to.
        what: is done, for people.
    """
    timer = threading.Timer(LONG_S, log.info, ("%s", what))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
