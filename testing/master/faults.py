"""Injected faults between a client and the master."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Fault:
    """A fault of the next requests that match.

    Attributes:
        pattern: A regular expression, searched for in `METHOD /path`.
        kind: `status` answers without doing anything; `drop` closes the connection without doing
            anything; `drop_answer` does what was asked and then closes the connection.
        times: Number of requests that fail; None for all.
        after: Number of matching requests that succeed first.
        hits: Number of requests that failed.
    """

    pattern: str
    kind: Literal["status", "drop", "drop_answer"] = "status"
    status: int = 503
    times: int | None = 1
    after: int = 0
    hits: int = field(default=0, init=False)

    def befalls(self, request: str) -> bool:
        """Return whether a request fails, and count it."""
        if not re.search(self.pattern, request):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        self.hits += 1
        return True
