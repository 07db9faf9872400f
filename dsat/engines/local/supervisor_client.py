"""Client of one supervisor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from dsat.engines.local.hosts import Host
from dsat.engines.local.process_record import RUN_VARIABLE
from dsat.values.files import PRIVATE_FILE

_CLOSE_LIMIT_S = 20.0
_TERMINATE_LIMIT_S = 5.0


class SupervisorClient:
    """Start a supervisor on a host, and talk with it.

    Args:
        host: where.
        log: file for the supervisor's own messages.
        env: the user's own variables, for modules that are imported in advance.
        folder: of the run.
    """

    def __init__(self, host: Host, log: Path, *, env: Mapping[str, str], folder: Path) -> None:
        self._log = log
        self._buffer = b""
        self._unsent = bytearray()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with open(os.open(log, flags, PRIVATE_FILE), "ab") as file:
            self._process = subprocess.Popen(  # noqa: S603
                [*host.prefix, sys.executable, "-m", "dsat.engines.local.supervisor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
                env=_environment(host.machine.accelerator, env, folder),
                start_new_session=True,
            )
        os.set_blocking(self.requests.fileno(), False)

    @property
    def pid(self) -> int:
        """Process ID of the supervisor, or of the command that starts it elsewhere."""
        return self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are answers."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def requests(self) -> IO[bytes]:
        """Writable when `flush` can send more."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def has_unsent(self) -> bool:
        """Requests wait for the supervisor to take them."""
        return bool(self._unsent)

    def send(self, request: Mapping[str, Any]) -> None:
        """Send as much of a request as possible without waiting; `flush` sends the rest.

        If the supervisor is gone, nothing happens: `read` says so.
        """
        self._unsent += json.dumps(request).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send queued requests, as far as possible without waiting."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self.requests.fileno(), self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent.clear()

    def read(self) -> list[dict[str, Any]] | None:
        """Return answers; None if the supervisor is gone."""
        chunk = os.read(self.fileno(), 65536)
        if not chunk:
            return None
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        # A login shell on another host may say something first.
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def reason_of_end(self) -> str:
        """Return how a supervisor ended that is gone."""
        self.ask_to_end()
        status = self.wait_for_end()
        return f"the process that runs trials ended (exit status {status}; see {self._log})"

    def ask_to_end(self) -> None:
        """Make the supervisor end with everything that it started; does nothing twice."""
        self.requests.close()

    def wait_for_end(self) -> int:
        """Wait for the end of a supervisor that was asked to end, and insist if need be.

        Returns:
            Its exit status.
        """
        for insist, limit_s in (
            (self._process.terminate, _CLOSE_LIMIT_S),
            (self._process.kill, _TERMINATE_LIMIT_S),
        ):
            try:
                self._process.wait(limit_s)
                break
            except subprocess.TimeoutExpired:
                insist()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._process.returncode

    def kill(self) -> None:
        self._process.kill()


def _environment(accelerator: str, own: Mapping[str, str], folder: Path) -> dict[str, str]:
    package = str(Path(__file__).resolve().parents[3])
    env = {**os.environ, **own}
    path = [*filter(None, [env.get("PYTHONPATH")]), package]
    return {
        **env,
        "PYTHONPATH": os.pathsep.join(path),
        # Neither asks CUDA for its devices, which would keep the process from forking.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        **({"DS_ACCELERATOR": accelerator} if accelerator else {}),
        "PYTHONSAFEPATH": "1",
        # Marks all processes below it, even those that change their own variables.
        RUN_VARIABLE: str(folder),
    }
