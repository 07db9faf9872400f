"""Standard streams that survive closed terminals and full disks."""

from __future__ import annotations

import errno
import os
import sys
from typing import IO, Any

_NOBODY_READS = (errno.EPIPE, errno.EIO)  # the reader of a pipe is gone, or the terminal is


def make_safe() -> None:
    """Open closed standard descriptors, and tolerate failing writes.

    Otherwise the next file that is opened, perhaps a journal, gets the number of a closed
    descriptor, and output of a library ends up in the file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            assert opened == descriptor, opened
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # not every encoding has ±
        if not isinstance(stream, _Safe):
            setattr(sys, name, _Safe(stream))


def why_output_is_lost() -> OSError | None:
    """Flush standard output; return the error that lost text which somebody reads, or None."""
    sys.stdout.flush()
    return getattr(sys.stdout, "failure", None)


class _Safe:
    """A text stream that discards text once writing fails."""

    failure: OSError | None = None

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError | ValueError) -> None:
        """Redirect the stream to /dev/null, so that exit does not write buffered text again."""
        if isinstance(error, OSError) and error.errno not in _NOBODY_READS:
            self.failure = error
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        except (OSError, ValueError):
            self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
