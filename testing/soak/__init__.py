"""Randomised attacks on dsat, reproducible by seed; `make soak` runs them at full size.

Each attack counts its tries by their end, and lists findings: tracebacks, hangs, lost results.
"""

from __future__ import annotations

import collections
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

from dsat.search import SEARCHES
from testing.started import Told

METHODS = tuple(SEARCHES)


@dataclass
class Tally:
    """Result of an attack.

    Attributes:
        by: number of tries by their end.
        findings: what broke, one line each, with the seed that reproduces it.
    """

    by: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: list[str] = field(default_factory=list)

    @property
    def tried(self) -> int:
        return self.by.total()

    def note(self, ending: str, finding: str = "") -> None:
        """Record a try."""
        self.by[ending] += 1
        if finding:
            self.findings.append(finding)


def complaint(told: Told) -> str:
    """Return what no command may do at its end, such as a traceback; empty if it did nothing of
    it."""
    if "Traceback" in told.err or told.status not in (0, 1, 2):
        return f"status {told.status}: {told.err[-600:]}"
    if told.status and "error: " not in told.err:
        return f"says nothing: {told.err[-600:]}"
    if len(told.err) > 20_000:
        return f"a flood of {len(told.err)} characters"
    return ""


class Hang(BaseException):
    """A call exceeded its time limit."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `Hang` if the body takes longer than `seconds`; works in the main thread only."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
