"""Ways to harm a process of the command line, for `testing.scenarios.Harm.before`."""

from __future__ import annotations

import functools
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

_CALLS = ("open", "write", "fsync", "replace", "mkdir", "ftruncate", "unlink", "rename")


def open_few_files(count: int = 16) -> None:
    """Close this process's files, and limit it to `count` open files."""
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def fail_writing(after: int, code: int, *, for_ever: bool) -> None:
    """Make the `after`-th writing call of `os` fail with an error number.

    Args:
        after: counted from 1.
        code: an error number, such as `errno.ENOSPC`.
        for_ever: make all later calls fail too.
    """

    def fail(number: int, args: tuple[Any, ...]) -> None:
        if number == after or (number > after and for_ever):
            raise OSError(code, os.strerror(code), *_paths(args))

    _before_each_write(fail)


def die_writing(after: int) -> None:
    """Kill this process just before its `after`-th writing call of `os`."""

    def die(number: int, args: tuple[Any, ...]) -> None:
        if number == after:
            os.kill(os.getpid(), signal.SIGKILL)

    _before_each_write(die)


def _before_each_write(act: Callable[[int, tuple[Any, ...]], None]) -> None:
    """Call `act` before each writing call of `os`, with the call's number and arguments."""
    number = 0

    def counted(real: Any) -> Any:
        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            nonlocal number
            if not _reads_only(real, args):
                number += 1
                act(number, args)
            return real(*args, **options)

        return call

    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))


def _reads_only(real: Any, args: tuple[Any, ...]) -> bool:
    if real.__name__ == "open":
        flags = args[1] if len(args) > 1 else os.O_RDONLY
        return not flags & (os.O_WRONLY | os.O_RDWR)
    return real.__name__ == "write" and args[0] in (1, 2)


def _paths(args: tuple[Any, ...]) -> tuple[str, ...]:
    return (os.fspath(args[0]),) if args and isinstance(args[0], (str, os.PathLike)) else ()
