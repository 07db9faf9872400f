"""Attacks on dsat, seeded: a share of each is a test, and `make soak` makes the whole.

Each attack says what it tried how often, and what broke: a traceback, a hang, a loss, a leftover.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType


@dataclass
class Tally:
    """Result of an attack.

    Attributes:
        tried: how many times.
        by: tries by how they ended.
        findings: what broke, one line each, with what it takes to see it again.
    """

    tried: int = 0
    by: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def note(self, ending: str, finding: str = "") -> None:
        """Enters a try."""
        self.tried += 1
        self.by[ending] = self.by.get(ending, 0) + 1
        if finding:
            self.findings.append(finding)


class Hang(BaseException):
    """Something took longer than it may."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises Hang in what takes longer; in the main thread only."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
