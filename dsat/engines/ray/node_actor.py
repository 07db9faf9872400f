"""Actor on each node: starts commands there, and relays their pipes.

Ray sends the class as it is, so that nodes need no dsat for it: only the standard library is used.
The pipes of a command belong to this process alone. When Ray ends it, with its driver or the node's
own daemon, the command's standard input ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

# Variables with which Ray tells a process its devices, by kind of accelerator.
_OF_DEVICES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ONEAPI_DEVICE_SELECTOR",
    "ASCEND_RT_VISIBLE_DEVICES",
    "HABANA_VISIBLE_MODULES",
)
_CHUNK = 1 << 16
# Ray kills the children of its processes that end. A command is a grandchild: it ends in order,
# with its standard input. Ray's processes have Ctrl-C blocked.
_PARENT = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
pid = os.fork()
if pid == 0:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    what = sys.argv[1]
    try:
        os.chdir(what)
        what = sys.argv[2]
        os.execve(what, sys.argv[2:], os.environ)
    except OSError as error:
        os.write(2, f"{what} on {os.uname().nodename}: {error.strerror}\\n".encode())
    os._exit(127)
signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
for number in (0, 1, 2):
    os.close(number)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
os._exit(status if status >= 0 else 128 - status)
"""


def readable(*descriptors: int, limit_s: float | None = None) -> set[int]:
    """Return those with something to read, or at their end, after waiting at most so long.

    Ray's processes have thousands of them, more than select(2) takes.
    """
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    return {found for found, _ in waiting.poll(None if limit_s is None else 1000 * limit_s)}


class NodeActor:
    """Run commands on a node; the methods are called from several threads.

    Args:
        cores: number of processor cores for the commands; None for all.
        cpu_only: leave the node's accelerators alone.
    """

    def __init__(self, cores: int | None, cpu_only: bool) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._numbers = itertools.count(1)
        self._env = {name: os.environ[name] for name in _OF_DEVICES if name in os.environ}
        if cpu_only:
            self._env = {"DS_ACCELERATOR": "cpu"}
        # Ray's processes are killed first where memory runs out, and run last; commands inherit it.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("0")
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        own = sorted(os.sched_getaffinity(0))
        if cores is not None and cores < len(own):
            os.sched_setaffinity(0, own[:cores])

    def where(self) -> tuple[str, str]:
        """Return Ray's ID of the node, and its host's name."""
        import ray

        return ray.get_runtime_context().get_node_id(), socket.gethostname()

    def start(self, command: Sequence[str], cwd: str, env: Mapping[str, str]) -> int:
        """Start a command; variables that name devices are this node's.

        Returns:
            Its number, for the other methods.
        """
        others = {name: value for name, value in env.items() if name not in _OF_DEVICES}
        number = next(self._numbers)
        self._processes[number] = subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-S", "-c", _PARENT, cwd, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**others, **self._env},
        )
        return number

    def write(self, number: int, data: bytes) -> None:
        """Write to a command's standard input; do nothing if it reads no more."""
        stdin = self._processes[number].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[stdin.write(data) or 0 :]

    def end(self, number: int) -> None:
        """End a command's standard input."""
        stdin = self._processes[number].stdin
        assert stdin is not None
        stdin.close()

    def read(self, number: int, target: int) -> bytes:
        """Return output of a command to 1 or 2, after waiting for it; nothing at its end."""
        process = self._processes[number]
        output = process.stdout if target == 1 else process.stderr
        assert output is not None
        return os.read(output.fileno(), _CHUNK)

    def wait(self, number: int) -> int:
        """Wait for a command's end; return its exit status."""
        return self._processes[number].wait()

    def terminate(self, number: int) -> None:
        """Send SIGTERM, which a command ignores that ends with its standard input."""
        self._processes[number].terminate()

    def forget(self, number: int) -> None:
        """Close the pipes of a command that has ended."""
        with self._processes.pop(number):
            pass
