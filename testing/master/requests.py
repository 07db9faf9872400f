"""Requests, answers, and the table of what is answered."""

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
        user: Its sender; empty where no token is needed.
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
    """An answer of one JSON object a line."""

    rows: Sequence[Json]


Answer = Json | Stream


class Master:
    """State of the master for handlers: the cluster, its lock, and the accounts.

    Attributes:
        changed: Notified after every request and every end of a process; also the lock.
        poll_s: How long a long poll lasts at most.
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
        """Start what fits now; called with the lock."""
        if not self.stopping:
            if self._made_up is not None:
                self._made_up.leave()
            self.cluster.schedule()
        self.changed.notify_all()

    def has_news(self, queue: EventQueue, count: int) -> bool:
        """Return whether a queue has more than so many events, or a made-up trial makes one."""
        if queue.count == count and self._made_up and self._made_up.let_one_end(self.cluster):
            self.drive()
        return queue.count > count

    def wait(self, holds: Callable[[], Any], timeout_s: float) -> None:
        """Waits, without the lock, until something holds; at most a while."""
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
    """The route of a request.

    Raises:
        ApiError: There is none.
    """
    for route in routes:
        parts = route.match(method, path)
        if parts is not None:
            return route, parts
    raise not_found("Not Found")
