"""Injected faults between a client and the master."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["status", "drop", "drop_answer", "delay"]


@dataclass
class Fault:
    """A fault of the next requests that match.

    Attributes:
        pattern: A regular expression, searched for in `METHOD /path`.
        kind: `status` answers without doing anything; `drop` closes the connection without doing
            anything; `drop_answer` does what was asked and then closes the connection; `delay`
            waits first.
        times: For how many requests more; None for all.
        after: How many matching requests go well before.
    """

    pattern: str
    kind: Kind = "status"
    status: int = 503
    delay_s: float = 0.0
    times: int | None = 1
    after: int = 0
    hits: int = field(default=0, init=False)

    def befalls(self, request: str) -> bool:
        """Return whether it applies to a request; count those that match."""
        if not re.search(self.pattern, request):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        self.hits += 1
        return True


class Faults:
    """The faults in force."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def of(self, request: str) -> Fault | None:
        """The first that befalls a request."""
        with self._lock:
            return next((fault for fault in self._faults if fault.befalls(request)), None)
