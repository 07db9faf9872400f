"""Actor on each node of a Ray cluster, which runs commands there.

Ray sends the class as it is, so that nodes need no dsat for it: it uses the standard library alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

# Variables with which Ray tells a process its devices, by kind of accelerator.
_OF_DEVICES = tuple(
    "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ONEAPI_DEVICE_SELECTOR "
    "ASCEND_RT_VISIBLE_DEVICES HABANA_VISIBLE_MODULES".split()
)
_CHUNK = 1 << 16
_Outputs = queue.Queue[tuple[int, bytes]]
# Ray kills the children of its processes that end. A command is a grandchild: it ends in order,
# with its standard input, whose only other end the actor has. Ray's processes have Ctrl-C blocked.
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


def _end_with_parent(pid: int) -> None:
    while os.getppid() == pid:
        time.sleep(1.0)
    os._exit(1)


class NodeActor:
    """Run commands on a node; the methods are called from several threads.

    Args:
        cores: number of processor cores for the commands, which leave the node's accelerators
            alone; None for all cores, and the devices that Ray gives this process.
    """

    def __init__(self, cores: int | None) -> None:
        # Ray 2.60 leaves an actor whose node's daemon was killed.
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
        self._numbers = itertools.count()
        self._commands: dict[int, tuple[subprocess.Popen[bytes], _Outputs]] = {}
        self._env = {name: os.environ[name] for name in _OF_DEVICES if name in os.environ}
        # Ray's processes are killed first where memory runs out, and run last; commands inherit it.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("0")
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        if cores is not None:
            self._env = {"DS_ACCELERATOR": "cpu"}
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])

    def spawn(self, command: Sequence[str], cwd: str, env: Mapping[str, str]) -> int:
        """Start a command; return its number. Variables that name devices are this node's."""
        others = {name: value for name, value in env.items() if name not in _OF_DEVICES}
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-S", "-c", _PARENT, cwd, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**others, **self._env},
        )
        number, outputs = next(self._numbers), _Outputs(16)
        self._commands[number] = (process, outputs)
        threading.Thread(target=_forward, args=(process, outputs), daemon=True).start()
        return number

    def read(self, number: int) -> tuple[int, bytes]:
        """Return the next output with the number of its pipe, or 0 and the exit status."""
        return self._commands[number][1].get()

    def write(self, number: int, data: bytes) -> None:
        """Write to a command's input, which ends with no data; nothing if it reads no more."""
        stdin = self._commands[number][0].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            if not data:
                stdin.close()
            while data:
                data = data[stdin.write(data) or 0 :]

    def terminate(self, number: int) -> None:
        """End a command by SIGTERM, which it ignores if it ends with its input."""
        self._commands[number][0].terminate()


def _forward(process: subprocess.Popen[bytes], outputs: _Outputs) -> None:
    with process, selectors.DefaultSelector() as open_pipes:
        for target, pipe in ((1, process.stdout), (2, process.stderr)):
            assert pipe is not None
            open_pipes.register(pipe, selectors.EVENT_READ, target)
        while open_pipes.get_map():
            for key, _ in open_pipes.select():
                if data := os.read(key.fd, _CHUNK):
                    outputs.put((key.data, data))
                else:
                    open_pipes.unregister(key.fileobj)
    outputs.put((0, b"%d" % process.returncode))
