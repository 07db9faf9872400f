"""Program that runs a command on a host through ssh, as if the command ran here.

    python3 -m dsat.engines.places.ssh_run [--port N] HOST COMMAND ...

The command gets the standard streams, current folder and environment variables of this process.
Folder and variables are sent through standard input, because all users of both hosts can read the
arguments of processes. The command's standard input ends when this process does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

# Never prompt; notice a lost connection within a minute.
_SSH = (
    "ssh",
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=15"),
    *("-o", "LogLevel=ERROR"),
    *("-o", "ServerAliveInterval=15"),
    *("-o", "ServerAliveCountMax=4"),
)
# A Python program that runs on the host; on a single line, which any shell can pass in quotes.
_BEGIN = (
    "import json, os; "
    "start = json.loads(b''.join(iter(lambda: os.read(0, 1), b'\\n'))); "
    "os.chdir(start['cwd']); "
    "os.execve(start['command'][0], start['command'], start['env'])"
)


def ssh_to(name: str, port: int | None) -> list[str]:
    """Return the words to put before a command to run it on a host."""
    return [*_SSH, *([] if port is None else ["-p", str(port)]), "--", name]


def _run(name: str, port: int | None, command: Sequence[str]) -> int:
    begin = "exec " + shlex.join([sys.executable, "-I", "-S", "-c", _BEGIN])
    process = subprocess.Popen([*ssh_to(name, port), begin], stdin=subprocess.PIPE, bufsize=0)  # noqa: S603
    assert process.stdin is not None
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # only ssh holds it now, so readers see ssh end
    start = {"cwd": os.getcwd(), "env": dict(os.environ), "command": list(command)}
    data = json.dumps(start).encode() + b"\n"
    with contextlib.suppress(BrokenPipeError):
        while data:
            while data:
                data = data[process.stdin.write(data) or 0 :]
            data = os.read(0, 65536)
    process.stdin.close()
    return process.wait()


def main() -> int:
    """Run the command line that the module describes; return its exit status."""
    argv, port = sys.argv[1:], None
    if argv[0] == "--port":
        port, argv = int(argv[1]), argv[2:]
    return _run(argv[0], port, argv[1:])


if __name__ == "__main__":
    sys.exit(main())
