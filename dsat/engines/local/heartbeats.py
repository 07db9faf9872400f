"""Signs of life of other hosts: each is asked now and then whether it still answers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

PING_EVERY_S = 10.0
# Longer than a host stalls that swaps, or whose files come over a slow network.
SILENT_AFTER_S = 60.0


class ListeningClock:
    """Seconds during which this process was able to listen.

    While this process is stopped (Ctrl-Z, a job that Slurm suspends) or busy it receives nothing,
    which must not count as the silence of hosts.

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


class Heartbeats:
    """Times of the hosts' last signs of life, and of the next request for one."""

    def __init__(self, hosts: Iterable[int]) -> None:
        self._clock = ListeningClock(PING_EVERY_S)
        self._heard_s = dict.fromkeys(hosts, 0.0)
        self._ask_at_s = 0.0

    def heard(self, host: int) -> None:
        """Note a message of a host."""
        self._heard_s[host] = self._clock.now_s()

    def restart(self) -> None:
        """Count silence from now on only: hosts were known to be busy."""
        self._heard_s = dict.fromkeys(self._heard_s, self._clock.now_s())

    def forget(self, host: int) -> None:
        """Stop watching a host."""
        del self._heard_s[host]

    def left_s(self) -> float:
        """Return the seconds until hosts are asked again; infinite without hosts."""
        return max(0.0, self._ask_at_s - self._clock.now_s()) if self._heard_s else math.inf

    def due(self) -> tuple[list[int], list[int]]:
        """Return silent hosts, and hosts to ask now; none between two rounds."""
        if self.left_s() > 0:
            return [], []
        now_s = self._clock.now_s()
        self._ask_at_s = now_s + PING_EVERY_S
        silent = [host for host, at_s in self._heard_s.items() if at_s < now_s - SILENT_AFTER_S]
        return silent, [host for host in self._heard_s if host not in silent]
