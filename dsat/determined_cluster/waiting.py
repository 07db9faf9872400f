"""Long polls, and messages while the trials wait for slots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from dsat.determined_cluster.retry import is_away
from dsat.report import format as fmt

T = TypeVar("T")

IDLE_STATES = ("PAUSED", "COMPLETED", "CANCELED", "ERROR", "DELETED")
_ASK_EVERY_S = 5.0
_TOLD_AFTER_S, _TOLD_AGAIN_AFTER_S = 15.0, 300.0
_WAITING = {
    "QUEUED": "trials wait for free slots",
    "PULLING": "the image of the trials is being pulled",
    "STARTING": "the containers of the trials are being started",
}


class LongPoll(Generic[T]):
    """A request that the master may take a minute to answer, made in a thread.

    An abandoned one ends with the process.

    Args:
        ask: makes the request.
    """

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._over = threading.Event()
        self._answers: list[T] = []
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="long-poll", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the answer came within so many seconds."""
        return self._over.wait(timeout_s)

    def result(self) -> T:
        """Return the answer, or raise the request's exception."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._answers[0]

    def _run(self) -> None:
        try:
            self._answers.append(self._ask())
        except Exception as error:  # raised again where the answer is asked for
            self._error = error
        finally:
            self._over.set()


class StateWatch:
    """Watches the state of the trials' experiment, and prints a line if they wait for long.

    Args:
        ask: requests the state; `RUNNING` if any trial runs.
        say: prints a line.
        clock: seconds.
    """

    def __init__(
        self,
        ask: Callable[[], str],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._say = say
        self._clock = clock
        self._asked_s = clock()
        self._state = ""
        self._since_s = 0.0
        self._told_s: float | None = None

    def is_idle(self) -> bool:
        """Return whether the experiment is paused or ended, by a recent request."""
        now = self._clock()
        if now - self._asked_s >= _ASK_EVERY_S:
            self._asked_s = now
            try:
                self._enter(self._ask(), now)
            except Exception as error:
                if not is_away(error):
                    raise
        return self._state in IDLE_STATES or self._state.startswith("STOPPING_")

    def _enter(self, state: str, now: float) -> None:
        if state != self._state:
            if self._told_s is not None and state == "RUNNING":
                self._say(f"trials run, after {fmt.duration(now - self._since_s)}")
            was_waiting, self._state = self._state in _WAITING, state
            if not (was_waiting and state in _WAITING):
                self._since_s, self._told_s = now, None
        if state not in _WAITING or now - self._since_s < _TOLD_AFTER_S:
            return
        if self._told_s is None or now - self._told_s >= _TOLD_AGAIN_AFTER_S:
            self._told_s = now
            self._say(f"{_WAITING[state]} (since {fmt.duration(now - self._since_s)})")
