"""Actor on each node: runs commands there, and streams their output.

Ray sends the class as it is, so that nodes need no dsat for it: only the standard library is used.
The pipes of a command belong to this process alone. When it ends, with Ray's driver or the node's
own daemon, the command's standard input ends.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

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
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._env = {name: os.environ[name] for name in _OF_DEVICES if name in os.environ}
        # Ray's processes are killed first where memory runs out, and run last; commands inherit it.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("0")
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        if cores is not None:
            self._env = {"DS_ACCELERATOR": "cpu"}
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])

    def run(
        self, number: int, command: Sequence[str], cwd: str, env: Mapping[str, str]
    ) -> Iterator[tuple[int, bytes]]:
        """Run a command; variables that name devices are this node's.

        Args:
            number: of the command, for `write` and `end`.
            command: with an absolute path.
            cwd: folder to run in.
            env: its variables.

        Yields:
            Its outputs, each after the number 1 or 2 of its pipe; before them (0, b"") once the
            command takes input, and behind them 0 and its exit status.
        """
        others = {name: value for name, value in env.items() if name not in _OF_DEVICES}
        process = self._processes[number] = subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-S", "-c", _PARENT, cwd, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**others, **self._env},
        )
        yield 0, b""
        with process, selectors.DefaultSelector() as outputs:
            for target, pipe in ((1, process.stdout), (2, process.stderr)):
                assert pipe is not None
                outputs.register(pipe, selectors.EVENT_READ, target)
            while outputs.get_map():
                for key, _ in outputs.select():
                    if data := os.read(key.fd, _CHUNK):
                        yield key.data, data
                    else:
                        outputs.unregister(key.fileobj)
        del self._processes[number]
        yield 0, b"%d" % process.returncode

    def write(self, number: int, data: bytes) -> None:
        """Write to a command's standard input; do nothing if it reads no more."""
        with contextlib.suppress(KeyError, BrokenPipeError, ValueError):  # it has ended
            stdin = self._processes[number].stdin
            assert stdin is not None
            while data:
                data = data[stdin.write(data) or 0 :]

    def end(self, number: int, *, terminate: bool) -> None:
        """End a command's standard input.

        Args:
            number: of the command, which may have ended.
            terminate: send SIGTERM too, which a command ignores that ends with its input.
        """
        process = self._processes.get(number)
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            if terminate:
                process.terminate()
