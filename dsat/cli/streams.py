"""Standard streams that may be closed, full or gone without ending a run."""

from __future__ import annotations

import os
import sys
from typing import IO, Any


def make_safe() -> None:
    """Open standard descriptors that are closed, and tolerate failing writes.

    A descriptor that is closed would be the next file's that is opened, a journal's perhaps, and
    everything that any library prints would go there.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            assert opened == descriptor, opened
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # not every terminal has a ±
        if not isinstance(stream, _Safe):
            setattr(sys, name, _Safe(stream))


class _Safe:
    """A text stream without a reader: once writing fails, text is discarded."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # ValueError: it was closed
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        """Send everything to nowhere, so that buffered text is not written again at exit."""
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        except (OSError, ValueError):
            self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
