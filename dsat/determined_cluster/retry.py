"""Repeat requests to a master that cannot be reached for a while."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

UNREACHABLE = "the master does not answer"
LIMIT_S = 1800.0
_LONGEST_PAUSE_S = 30.0
_AWAY = (502, 503, 504)
_OBJECT = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>:?\s*")


def is_away(error: BaseException) -> bool:
    """Return whether an error means that the master cannot be reached, not that it refuses."""
    from determined.common.api import errors

    if isinstance(error, errors.APIException):
        return error.status_code in _AWAY
    refused = (errors.ForbiddenException, errors.UnauthenticatedException)
    if isinstance(error, errors.BadRequestException):
        return not isinstance(error, refused)
    return isinstance(error, OSError)  # requests' own exceptions are such


def in_words(error: BaseException) -> str:
    """Return the reason of a failed request, without the repr of library objects."""
    link, seen = error, {id(error)}
    while True:
        # urllib3 keeps what it met as `reason`, requests as its first argument.
        below = getattr(link, "reason", None) or next(iter(link.args), None)
        below = below if isinstance(below, BaseException) else link.__cause__ or link.__context__
        if not isinstance(below, BaseException) or id(below) in seen:
            break
        link = below
        seen.add(id(link))
    if isinstance(link, OSError) and link.strerror:
        return link.strerror.lower()
    if isinstance(link, TimeoutError) or "imeout" in type(link).__name__:
        return "no answer in time"
    status = getattr(error, "status_code", None)
    if status in _AWAY:
        return f"status {status}"
    said = str(link).strip().splitlines()
    return _OBJECT.sub("", said[0]).strip() if said else type(link).__name__


def retry_while_unreachable(
    call: Callable[[], T],
    say: Callable[[str], None],
    *,
    limit_s: float = LIMIT_S,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return a request's answer, waiting for a master that cannot be reached.

    Args:
        call: makes the request; must do no harm if it is made twice.
        say: prints a line at the first failure.
        limit_s: how long to wait; then the last error is raised.
        sleep: waits for so many seconds.
    """
    waited_s, pause_s = 0.0, 1.0
    while True:
        try:
            return call()
        except Exception as error:
            if not is_away(error) or waited_s >= limit_s:
                raise
            if waited_s == 0:
                say(f"{UNREACHABLE} ({in_words(error)}); trying again")
        sleep(pause_s)
        waited_s += pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
