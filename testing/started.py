"""A command in a child process, and what it printed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import termios
import time
from dataclasses import dataclass
from typing import Any

_LIMIT_S = 120.0


@dataclass(frozen=True)
class Told:
    """Exit status and outputs of a command that has ended."""

    status: int
    out: str
    err: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def best(self) -> dict[str, Any]:
        """The row of the recommended trial in the output of `--json`."""
        row = self.json["best"]
        assert isinstance(row, dict), self
        return row

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The rows of all trials in the output of `--json`."""
        rows = self.json["trials"]
        assert isinstance(rows, list)
        return rows


class Started:
    """A running command; `wait` for its end, or signal it first."""

    def __init__(
        self, pid: int, out: int, err: int | None, resized_to: tuple[int, int] | None = None
    ) -> None:
        self.pid = pid
        self._out, self._err = out, err
        self._resized_to = resized_to

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def is_running(self) -> bool:
        """Return whether the process has not ended yet."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def read_json(self) -> Any:
        """Read the first JSON object that the command prints, while it runs."""
        text = b""
        while not text.endswith(b"}\n"):
            text += os.read(self._out, 4096)
        return json.loads(text)

    def wait(self) -> Told:
        """Wait for the end and return the outputs; a command that hangs gets the status
        -SIGALRM."""
        found = {self._out: b"", **({} if self._err is None else {self._err: b""})}
        still_open, deadline = set(found), time.monotonic() + _LIMIT_S
        while still_open and time.monotonic() < deadline:
            for pipe in select.select(list(still_open), [], [], 1.0)[0]:
                try:
                    data = os.read(pipe, 2**16)
                except OSError:  # a terminal whose process has ended
                    data = b""
                found[pipe] += data
                if not data:
                    still_open.remove(pipe)
                elif self._resized_to is not None:
                    resize(pipe, *self._resized_to)
                    self._resized_to = None
        hangs = bool(still_open)
        if hangs:
            self.signal(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        for pipe in found:
            os.close(pipe)
        texts = [data.decode("utf-8", "replace") for data in found.values()]
        return Told(-signal.SIGALRM if hangs else os.waitstatus_to_exitcode(status), *texts)


def resize(terminal: int, columns: int, lines: int) -> None:
    """Change the size of a terminal."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
