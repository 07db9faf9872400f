"""A host whose supervisors start with torch and DeepSpeed imported, for tests with many engines.

    python -m testing.warm_host SOCKET

In a supervisor, the imports take six seconds of CPU time; a query of the accelerators takes three.
This process imports everything once. Then it forks a supervisor, a query, or a program passed with
`-c`, for each `CLIENT` that connects. `CLIENT` stands in place of a command that reaches another
host, and sends three pipes, a folder and variables. A warm host ends with the process that started
it.

A forked process has the engine's pipes and ends as usual. But it is a child of neither the engine's
process nor the client, so tests of processes need a plain host.
"""

from __future__ import annotations

import array
import atexit
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

# Runs without site packages and with few modules, so that it starts quickly.
CLIENT = """
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as there:
    there.connect(sys.argv[1])
    pipes = socket.SCM_RIGHTS, array.array("i", [0, 1, 2])
    there.sendmsg([b"."], [(socket.SOL_SOCKET, *pipes)])
    start = {"folder": os.getcwd(), "env": dict(os.environ), "command": sys.argv[2:]}
    there.sendall(json.dumps(start).encode() + b"\\n")
    for number in (0, 1):
        os.close(number)
    sys.exit(int(there.makefile().readline() or 1))
"""
SUPERVISOR = ["-m", "dsat.engines.agent.supervisor"]
LOOK = ["-m", "dsat.engines.machines.accelerators"]


def prefix(**variables: str) -> tuple[str, ...]:
    """Return a prefix for commands: a warm host forks a command that has it.

    Args:
        variables: variables of the warm host; by default it is on a CPU.
    """
    return _started(tuple({"DS_ACCELERATOR": "cpu", **variables}.items()))


@functools.cache
def _started(variables: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    address = Path(tempfile.mkdtemp(prefix="dsat-warm-")) / "s"
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, str(address)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[1],  # a test may have changed the working directory
        env={**os.environ, **dict(variables)},
        start_new_session=True,
    )
    assert process.stdout is not None
    # DeepSpeed logs to the standard output when it is imported, in versions before 0.16.
    assert b"listening\n" in iter(process.stdout.readline, b"")
    atexit.register(_end, process)
    return (sys.executable, "-S", "-E", "-c", CLIENT, str(address))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.communicate()


def serve(address: str) -> None:
    """Fork supervisors until the standard input ends; then remove the socket's folder."""
    from dsat.engines.supervisors import WARM_MODULES
    from dsat.in_trial.adapters.install import install

    install()  # as a supervisor does before its imports
    # Includes what a supervisor imports after a first trial with the Trainer, which takes seconds.
    for name in (*WARM_MODULES, "dsat.simulation.borrowed_model", "transformers.trainer"):
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(16)
        print("listening", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _attend(connection)
            connection.close()
    os.unlink(address)
    os.rmdir(Path(address).parent)  # contains only the socket


def _attend(connection: socket.socket) -> NoReturn:
    """Fork a process, and report its exit status to the client."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pipes = array.array("i")
    _, control, *_ = connection.recvmsg(1, socket.CMSG_SPACE(3 * pipes.itemsize))
    [(_, _, numbers)] = control
    pipes.frombytes(numbers)
    start = json.loads(connection.makefile().readline())
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(start, list(pipes))
    for number in pipes:
        os.close(number)
    for number in (0, 1):  # the server's pipes, which must close when the server ends
        os.close(number)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection.sendall(f"{status if status >= 0 else 128 - status}\n".encode())
    os._exit(0)


def _become(start: dict[str, Any], pipes: list[int]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        for number, pipe in enumerate(pipes):
            os.dup2(pipe, number)
            os.close(pipe)
        os.environ.clear()
        os.environ.update(start["env"])
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path and path not in sys.path]
        os.chdir(start["folder"])
        status = _run(start["command"][1:])
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _run(words: list[str]) -> int:
    from dsat.engines.agent.supervisor import Supervisor
    from dsat.engines.machines import accelerators

    if words == SUPERVISOR:
        Supervisor().run()
    elif words[:1] == ["-c"]:
        return _run_program(words[1])
    else:
        assert words == LOOK, words
        accelerators.look()
    return 0


def _run_program(code: str) -> int:
    """Run a program, with exit functions as in an interpreter; return its exit status."""
    status = 0
    atexit._clear()
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    return status


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the current folder, as of a supervisor
    serve(sys.argv[1])
