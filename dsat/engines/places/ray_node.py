"""Actor that runs commands on a node of a Ray cluster.

Ray sends the code of the class to the nodes, so it must import only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

# Variables by which Ray assigns devices to a process, one for each kind of accelerator.
_OF_DEVICES = tuple(
    "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ONEAPI_DEVICE_SELECTOR "
    "ZE_AFFINITY_MASK ASCEND_RT_VISIBLE_DEVICES HABANA_VISIBLE_MODULES".split()
)
# When a process ends, Ray kills its children. A grandchild can clean up when its input ends.
_AS_GRANDCHILD = ("setsid", "--fork", "--wait", "env", "--chdir")


def _end_with_parent(pid: int) -> None:
    while os.getppid() == pid:
        time.sleep(1.0)
    os._exit(1)


class NodeActor:
    """Runner of commands on a node; several threads call its methods.

    Args:
        cores: number of CPU cores for commands, which then use no accelerator. With None,
            they use all cores, and the devices that Ray assigns to this process.
    """

    def __init__(self, cores: int | None) -> None:
        # Ray 2.60 does not end an actor when the daemon of its node is killed.
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
        self._commands: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        self._env = {name: os.environ[name] for name in _OF_DEVICES if name in os.environ}
        # The kernel kills Ray's processes first if memory runs out; commands would inherit that.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("0")
        if cores is not None:
            self._env = {"DS_ACCELERATOR": "cpu"}
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])

    def spawn(self, command: Sequence[str], cwd: str, env: Mapping[str, str]) -> int:
        """Start a command; return its number. Ignore variables in `env` that select devices."""
        base_env = {name: value for name, value in env.items() if name not in _OF_DEVICES}
        pipe, errors = subprocess.PIPE, tempfile.TemporaryFile()  # noqa: SIM115
        words, variables = [*_AS_GRANDCHILD, cwd, *command], {**base_env, **self._env}
        process = subprocess.Popen(  # noqa: S603
            words, stdin=pipe, stdout=pipe, stderr=errors, bufsize=0, env=variables
        )
        self._commands.append((process, errors))
        return len(self._commands) - 1

    def read(self, number: int) -> bytes:
        """Return the next bytes of a command's output; no bytes at its end."""
        stdout = self._commands[number][0].stdout
        assert stdout is not None
        return stdout.read(65536)

    def write(self, number: int, data: bytes) -> None:
        """Write to a command's input; close the input if `data` is empty."""
        stdin = self._commands[number][0].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # the command reads no more
            if not data:
                stdin.close()
            while data:
                data = data[stdin.write(data) or 0 :]

    def wait(self, number: int) -> tuple[int, bytes]:
        """Wait for the end of a command; return its exit status and standard error."""
        process, errors = self._commands[number]
        with process, errors:
            status = process.wait()
            errors.seek(0)
            return status, errors.read()

    def kill(self, number: int) -> None:
        pid = self._commands[number][0].pid
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
            for child in file.read().split():
                os.kill(int(child), signal.SIGKILL)
