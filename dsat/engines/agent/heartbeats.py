"""Heartbeats of other hosts."""

from __future__ import annotations

import time

PING_EVERY_S = 10.0
# Longer than a host stalls that swaps, or whose files come over a slow network.
SILENT_AFTER_S = 60.0


class ListeningClock:
    """Seconds during which this process was able to listen: it was neither stopped nor busy.

    Args:
        most_s: the most that the time between two readings counts.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._read_s = time.monotonic()
        self._now_s = 0.0

    def now_s(self) -> float:
        """Return the seconds so far."""
        read_s = time.monotonic()
        self._now_s += min(read_s - self._read_s, self._most_s)
        self._read_s = read_s
        return self._now_s
