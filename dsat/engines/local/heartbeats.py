"""Whether processes on other hosts still answer: each is asked now and then for a sign of life."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

PING_EVERY_S = 10.0
# Longer than a host stalls that swaps, or whose files come over a slow network.
SILENT_AFTER_S = 60.0


class ListeningClock:
    """Seconds during which this process was able to listen.

    Whoever is stopped (Ctrl-Z, a job that Slurm suspends) or busy hears nothing of others, and that
    is not their silence.

    Args:
        most_s: so much of the time between two looks at this clock counts at most.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._looked_s = time.monotonic()
        self._now_s = 0.0

    def now_s(self) -> float:
        looked_s = time.monotonic()
        self._now_s += min(looked_s - self._looked_s, self._most_s)
        self._looked_s = looked_s
        return self._now_s


class Heartbeats:
    """When hosts are asked for a sign of life, and which have given none for too long.

    What it costs between two rounds of questions does not depend on the number of hosts.

    Args:
        hosts: their numbers.
    """

    def __init__(self, hosts: Iterable[int]) -> None:
        self._clock = ListeningClock(PING_EVERY_S)
        self._heard_s = dict.fromkeys(hosts, 0.0)
        self._ask_at_s = 0.0

    def expect(self, host: int) -> None:
        """Expects signs of life of one more host from now on."""
        self._heard_s[host] = self._clock.now_s()

    def heard(self, host: int) -> None:
        """A host has said something."""
        if host in self._heard_s:
            self._heard_s[host] = self._clock.now_s()

    def restart(self) -> None:
        """Hosts were busy, and known to be: nothing they did not say until now counts."""
        self._heard_s = dict.fromkeys(self._heard_s, self._clock.now_s())

    def forget(self, host: int) -> None:
        """Expects nothing of a host any more."""
        self._heard_s.pop(host, None)

    def left_s(self) -> float:
        """Seconds until hosts are to be asked again; endless if there are none."""
        if not self._heard_s:
            return math.inf
        return max(0.0, self._ask_at_s - self._clock.now_s())

    def to_ask(self) -> list[int]:
        """Hosts that are to be asked now; between two rounds none."""
        now_s = self._clock.now_s()
        if not self._heard_s or now_s < self._ask_at_s:
            return []
        self._ask_at_s = now_s + PING_EVERY_S
        return list(self._heard_s)

    def silent(self, hosts: Iterable[int]) -> list[int]:
        """Those of the hosts that have given no sign of life for too long."""
        since_s = self._clock.now_s() - SILENT_AFTER_S
        return [host for host in hosts if self._heard_s[host] < since_s]
