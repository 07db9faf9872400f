"""Processes on hosts, which are reached by words before a command, or by calls."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

# Words before a command that run it on a host; or a function that calls `spawn`, `read`, `write`
# and `terminate` there (`dsat.engines.places.ray_node.NodeActor`), and raises if it is lost.
Reach = Sequence[str] | Callable[..., Any]
_CHUNK = 1 << 16
_LOST = 255  # exit status


def spawn(
    reach: Reach, command: Sequence[str], env: Mapping[str, str] | None, errors: IO[bytes]
) -> subprocess.Popen[bytes] | RemoteProcess:
    """Start a command on a host.

    Args:
        reach: of the host.
        command: with an absolute path.
        env: its variables; by default this process's.
        errors: what it writes to its standard error goes there.
    """
    if callable(reach):
        return RemoteProcess(reach, command, dict(os.environ if env is None else env), errors)
    return subprocess.Popen(  # noqa: S603
        [*reach, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=env,
        start_new_session=True,
    )


class RemoteProcess:
    """A command on a host that is reached by calls; has the interface of `subprocess.Popen`."""

    def __init__(
        self,
        call: Callable[..., Any],
        command: Sequence[str],
        env: dict[str, str],
        errors: IO[bytes],
    ) -> None:
        self.args = command
        self.returncode: int | None = None
        self._call = call
        self._number = call("spawn", list(command), os.getcwd(), env)
        given, to_it = os.pipe()
        from_it, output = os.pipe()
        self.stdin, self.stdout = os.fdopen(to_it, "wb", 0), os.fdopen(from_it, "rb")
        self._errors = os.dup(errors.fileno())
        threading.Thread(target=self._relay_input, args=(given,), daemon=True).start()
        self._reader = threading.Thread(target=self._relay_output, args=(output,), daemon=True)
        self._reader.start()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit status."""
        self._reader.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def terminate(self) -> None:
        """End it by SIGTERM; one that is lost ends with its host."""
        with contextlib.suppress(Exception):  # a host may fail in any way
            self._call("terminate", self._number)

    kill = terminate

    def _relay_input(self, given: int) -> None:
        with contextlib.suppress(Exception), os.fdopen(given, "rb", 0) as pipe:
            while data := pipe.read(_CHUNK):
                self._call("write", self._number, data)
            self._call("write", self._number, b"")

    def _relay_output(self, output: int) -> None:
        status = _LOST
        with os.fdopen(output, "wb", 0) as pipe:
            try:
                while (item := self._call("read", self._number))[0]:
                    target, data = item
                    with contextlib.suppress(BrokenPipeError):  # nobody reads any more
                        (os.write(self._errors, data) if target == 2 else pipe.write(data))
                status = int(item[1])
            except Exception as error:  # a host may fail in any way
                os.write(self._errors, f"{str(error).splitlines()[0]}\n".encode())
            os.close(self._errors)
            self.returncode = status
