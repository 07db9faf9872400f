"""Start of commands on hosts, directly, through a command such as ssh, or by a Ray actor."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

# How to run a command on a host: the words to put before it; or a function that calls a method of a
# `NodeActor` (`dsat.engines.places.ray_node`), which raises some exception if the node is lost.
Reach = Sequence[str] | Callable[..., Any]
_LOST = 255  # exit status of a command whose host is lost
_KILLED_WITHIN_S = 5.0


def variables_with_dsat(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for a Python process that imports dsat.

    They are this process's, updated with `variables`. The Python process does not import modules
    of its current folder.
    """
    env = {**os.environ, **variables}
    path = [*filter(None, [env.get("PYTHONPATH")]), str(Path(__file__).resolve().parents[3])]
    return {**env, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def spawn(
    reach: Reach, command: Sequence[str], env: Mapping[str, str] | None, errors: IO[bytes]
) -> subprocess.Popen[bytes] | RemoteProcess:
    """Start a command on a host, with pipes for its standard input and output.

    Args:
        command: its first word must be the absolute path of the program.
        env: None for the environment of this process.
        errors: receives standard error; on Ray, only when the command has ended.
    """
    if callable(reach):
        return RemoteProcess(reach, command, dict(os.environ if env is None else env), errors)
    pipe, words = subprocess.PIPE, [*reach, *command]
    return subprocess.Popen(  # noqa: S603
        words, stdin=pipe, stdout=pipe, stderr=errors, env=env, start_new_session=True
    )


class RemoteProcess:
    """A command that a Ray actor runs, with a part of the interface of `subprocess.Popen`."""

    def __init__(
        self, call: Callable[..., Any], command: Sequence[str], env: dict[str, str], errors: Any
    ) -> None:
        self.args = command
        self.returncode: int | None = None
        self._call = call
        self._number = call("spawn", list(command), os.getcwd(), env)
        self._errors = os.dup(errors.fileno())
        requests, stdin_fd = os.pipe()
        stdout_fd, answers = os.pipe()
        self.stdin, self.stdout = os.fdopen(stdin_fd, "wb", 0), os.fdopen(stdout_fd, "rb")
        self._reader = threading.Thread(target=self._relay_output, args=(answers,), daemon=True)
        self._reader.start()
        threading.Thread(target=self._relay_input, args=(requests,), daemon=True).start()

    def wait(self, timeout: float | None = None) -> int:
        self._reader.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        """Kill the command; if it does not end within 5 s, count the host as lost."""
        threading.Thread(target=self._request_kill, daemon=True).start()
        self._reader.join(_KILLED_WITHIN_S)
        if self.returncode is None:
            self.returncode = _LOST

    terminate = kill

    def _request_kill(self) -> None:
        with contextlib.suppress(Exception):
            self._call("kill", self._number)

    def _relay_input(self, requests: int) -> None:
        with contextlib.suppress(Exception), os.fdopen(requests, "rb", 0) as pipe:
            while data := pipe.read(65536):
                self._call("write", self._number, data)
            self._call("write", self._number, b"")

    def _relay_output(self, answers: int) -> None:
        try:
            with contextlib.suppress(BrokenPipeError), os.fdopen(answers, "wb", 0) as pipe:
                while data := self._call("read", self._number):
                    pipe.write(data)
            status, text = self._call("wait", self._number)
        except (Exception, SystemExit) as error:  # Ray raises SystemExit after its shutdown
            line = traceback.format_exception_only(error)[0].splitlines()[0]
            status, text = _LOST, f"{line}\n".encode()
        os.write(self._errors, text)
        os.close(self._errors)
        self.returncode = status
