"""Requests, answers, and the table that maps requests to handlers."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from testing.master.accounts import Accounts
from testing.master.cluster import Cluster
from testing.master.errors import not_found
from testing.master.experiment import EventQueue
from testing.master.made_up import MadeUpTrials

Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A request whose sender is known.

    Attributes:
        user: The sender's name; empty if the route needs no login.
        parts: Values of the path's placeholders.
    """

    params: Mapping[str, list[str]]
    body: Json
    user: str
    parts: Mapping[str, str]

    def id(self) -> int:
        return int(self.parts["id"])

    def param(self, name: str, default: str = "") -> str:
        return self.params.get(name, [default])[0]


@dataclass(frozen=True)
class Stream:
    """An answer that consists of one JSON object per line."""

    rows: Sequence[Json]


Answer = Json | Stream


class Master:
    """State of the master for handlers: the cluster, its lock, and the accounts.

    Attributes:
        changed: The lock, also notified after every request and every end of a process.
        poll_s: The longest duration of a long poll.
        redelivered: Events to send once more before the next ones, by experiment id.
    """

    def __init__(
        self,
        cluster: Cluster,
        accounts: Accounts,
        version: str,
        poll_s: float,
        made_up: MadeUpTrials | None,
    ) -> None:
        self.cluster = cluster
        self.accounts = accounts
        self.version = version
        self.poll_s = poll_s
        self.changed = threading.Condition(threading.RLock())
        self.stopping = False
        self._made_up = made_up
        self.redelivered: dict[int, list[Json]] = {}

    def drive(self) -> None:
        """Start the allocations that fit now; the caller holds the lock."""
        if not self.stopping:
            if self._made_up is not None:
                self._made_up.leave()
            self.cluster.schedule()
        self.changed.notify_all()

    def has_news(self, queue: EventQueue, count: int) -> bool:
        """Return whether a queue has had more than `count` events; if not, a made-up trial may
        end."""
        if queue.count == count and self._made_up and self._made_up.let_one_end(self.cluster):
            self.drive()
        return queue.count > count

    def wait(self, holds: Callable[[], Any], timeout_s: float) -> None:
        """Wait, with the lock released, until `holds()` is true or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not self.stopping and not holds():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self.changed.wait(left)


Handler = Callable[[Master, Request], Answer]


@dataclass(frozen=True)
class Route:
    """A method and a path with placeholders such as `{id}`."""

    method: str
    path: str
    handler: Handler
    needs_login: bool = True

    def match(self, method: str, path: str) -> Mapping[str, str] | None:
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path)
        found = re.fullmatch(pattern, path) if method == self.method else None
        return None if found is None else found.groupdict()


def find(routes: list[Route], method: str, path: str) -> tuple[Route, Mapping[str, str]]:
    """Return the route of a request, and the values of its path's placeholders.

    Raises:
        ApiError: No route matches.
    """
    for route in routes:
        parts = route.match(method, path)
        if parts is not None:
            return route, parts
    raise not_found("Not Found")
