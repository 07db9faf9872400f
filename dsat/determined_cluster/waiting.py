"""Long polls, and messages while trials wait for slots or for their containers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

from dsat.determined_cluster.master import is_ending, retry_limit_s
from dsat.values import format as fmt

T = TypeVar("T")

_LONGEST_POLL_S = 180.0  # a master answers within 60 s, but never if its host lost power
_ASK_EVERY_S = 5.0
_LIST_EVERY_S = 30.0
_START_S = 60.0  # most time from a trial's start to its script's first call of dsat
_LOG_AFTER_S, _LOG_AGAIN_AFTER_S = 15.0, 300.0
_WAITING = {
    "QUEUED": "trials wait for free slots",
    "PULLING": "the image of the trials is being pulled",
    "STARTING": "the containers of the trials are being started",
}


def long_poll(
    ask: Callable[[], T],
    check: Callable[[], None],
    is_idle: Callable[[], bool],
    every_s: float = 0.5,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Return the answer to a request that the master may answer late.

    Args:
        check: called every `every_s`; raises an exception to abandon the request.
        is_idle: whether the experiment is paused or ended. When it becomes so, the master
            does not answer a waiting request, so a new one is made.
    """
    poll, began_s, was_idle = _in_background(ask), clock(), False
    while True:
        check()
        if futures.wait([poll], timeout=every_s).done:
            return poll.result()
        idle = is_idle()
        if (idle and not was_idle) or clock() - began_s > _LONGEST_POLL_S:
            poll, began_s = _in_background(ask), clock()
        was_idle = idle


def _in_background(ask: Callable[[], T]) -> Future[T]:
    """Make a request in a daemon thread, so that an abandoned request does not block the exit."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="long-poll", daemon=True).start()
    return answer


class StateWatch:
    """Tracker of the state of the trials' experiment; it logs long waits."""

    def __init__(
        self,
        ask: Callable[[], str],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._say = say
        self._clock = clock
        self._requested_at_s = clock()
        self._state = ""
        self._since_s = 0.0
        self._logged_s: float | None = None

    def is_idle(self) -> bool:
        """Return whether the experiment is paused or ending, as of a recent request."""
        now = self._clock()
        if now - self._requested_at_s >= _ASK_EVERY_S:
            self._requested_at_s = now
            try:
                self._enter(self._ask(), now)
            except Exception as error:
                if not retry_limit_s(error):
                    raise
        return self._state == "PAUSED" or is_ending(self._state)

    def _enter(self, state: str, now: float) -> None:
        if state != self._state:
            if self._logged_s is not None and state == "RUNNING":
                self._say(f"trials run now, after waiting {fmt.duration(now - self._since_s)}")
            was_waiting, self._state = self._state in _WAITING, state
            if not (was_waiting and state in _WAITING):
                self._since_s, self._logged_s = now, None
        if state not in _WAITING or now - self._since_s < _LOG_AFTER_S:
            return
        if self._logged_s is None or now - self._logged_s >= _LOG_AGAIN_AFTER_S:
            self._logged_s = now
            self._say(f"{_WAITING[state]} (for {fmt.duration(now - self._since_s)})")


class TimeLimit:
    """Detector of trials that hold their slots for longer than the time limit allows.

    A trial ends itself at the limit, but only once its script has called dsat.

    Args:
        ask: returns ids of running trials, by (number in the search, restarts).
        timeout_s: the user's limit; a trial may hold its slots for up to a minute more.
    """

    def __init__(
        self,
        ask: Callable[[], Mapping[tuple[int, int], int]],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._limit_s = timeout_s + min(timeout_s, _START_S)
        self._requested_at_s = clock()
        self._since_s: dict[tuple[int, int], float] = {}

    def overdue(self) -> dict[int, int]:
        """Return ids of trials over the limit, by number in the search; empty between checks."""
        now = self._clock()
        if now - self._requested_at_s < min(self._limit_s / 2, _LIST_EVERY_S):
            return {}
        self._requested_at_s = now
        try:
            running = self._ask()
        except Exception as error:
            if not retry_limit_s(error):
                raise
            return {}
        self._since_s = {trial: self._since_s.get(trial, now) for trial in running}
        late = [trial for trial in running if now - self._since_s[trial] > self._limit_s]
        return {trial[0]: running[trial] for trial in late}
