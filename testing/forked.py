"""Processes forked from one that has imported dsat and Determined; time runs fast in them.

A fork takes 0.01 s, while the imports of dsat and Determined take 2 s. The fork server of
`multiprocessing` is a separate process, so forks inherit nothing from the test's process.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from dsat.engines.agent.rank_process import PR_SET_PDEATHSIG, prctl

# Variable that names a file; the file holds the seconds by which `time.time` is ahead.
AHEAD = "DSAT_TEST_AHEAD_FILE"
_ROOT = str(Path(__file__).parents[1])
_FORKS = multiprocessing.get_context("forkserver")


class Forked:
    """A forked process with the part of `subprocess.Popen`'s interface that tests need.

    Args:
        target, args: the function to call, and its arguments; both must be picklable.
        environment: all variables of the process.
    """

    def __init__(
        self,
        target: Callable[..., None],
        args: Sequence[object],
        *,
        environment: Mapping[str, str],
        folder: Path,
    ) -> None:
        _ensure_server()
        streams = [_FORKS.Pipe(duplex=False) for _ in range(2)]
        outputs = [write for _, write in streams]
        self._process = _FORKS.Process(
            target=_run, args=(target, args, dict(environment), str(folder), outputs)
        )
        self._process.start()
        for write in outputs:
            write.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._printed: dict[str, str] = {}
        self._readers: list[threading.Thread] = []
        self.stdout, self.stderr = (_readable(read) for read, _ in streams)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return what the process printed to stdout and stderr."""
        if not self._readers:
            for name in ("stdout", "stderr"):
                self._readers.append(threading.Thread(target=self._read, args=(name,), daemon=True))
                self._readers[-1].start()
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        return self._printed["stdout"], self._printed["stderr"]

    def _read(self, name: str) -> None:
        with getattr(self, name) as stream:
            self._printed[name] = stream.read().decode()


def run_module(module: str, *words: str) -> None:
    """Run a module in this process, like `python3 -m module words`."""
    sys.argv = [module, *words]
    sys.modules.pop(module, None)  # runpy warns about a module that is already imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _ensure_server() -> None:
    """Start the fork server unless it runs; each process that runs tests has one."""
    multiprocessing.set_forkserver_preload(["testing.fast_time"])
    with_root = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = with_root  # a test may have changed the working directory
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _readable(connection: Connection) -> IO[bytes]:
    with connection:
        return os.fdopen(os.dup(connection.fileno()), "rb")


def _run(
    target: Callable[..., None],
    args: Sequence[object],
    environment: Mapping[str, str],
    folder: str,
    outputs: Sequence[Connection],
) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the fork server ends with the tests
    os.setsid()
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), number)
        output.close()
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    target(*args)
