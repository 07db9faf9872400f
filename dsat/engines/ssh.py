"""Hosts of a hostfile, which are reached with ssh.

    python3 -m dsat.engines.ssh [--port N] HOST COMMAND ...

runs a command on a host as `srun` does on a node: with these three pipes, in the same folder, with
the same variables. They go through the pipe, since everyone on both hosts can see the arguments of
processes. The command's standard input ends with this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from dsat.errors import EngineError, UserInputError

_REACH_LIMIT_S = 60.0
# Asks nothing; notices within a minute that the other end is gone.
_SSH = (
    "ssh",
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=15"),
    *("-o", "LogLevel=ERROR"),
    *("-o", "ServerAliveInterval=15"),
    *("-o", "ServerAliveCountMax=4"),
)
# On the host; one line, which any shell takes in quotes.
_BEGIN = (
    "import json, os; "
    "told = json.loads(b''.join(iter(lambda: os.read(0, 1), b'\\n'))); "
    "os.chdir(told['cwd']); "
    "os.execve(told['command'][0], told['command'], told['env'])"
)
_ANY_PORT = 9


@dataclass(frozen=True)
class Reached:
    """A host that ssh reaches, or the one that this process runs on.

    Attributes:
        name: as the user has written it.
        address: by which other hosts reach it.
        prefix: what goes before a command so that it runs there; nothing where that is here.
    """

    name: str
    address: str
    prefix: tuple[str, ...]
    is_here: bool


def reach(names: Sequence[str], port: int | None) -> list[Reached]:
    """The hosts of these names; the one that this process runs on comes first.

    Args:
        port: of their ssh servers; None for what ssh is configured for.

    Raises:
        UserInputError: ssh is missing, does not reach one without a question, or this machine is
            named twice.
    """
    if shutil.which("ssh") is None:
        raise UserInputError("needs ssh, which is not installed", where="--hostfile")
    addresses = {name: _address_of(name) for name in names}
    here = [name for name in names if _is_here(name, addresses[name])]
    if len(here) > 1:
        raise UserInputError(f"names this machine twice: {', '.join(here)}", where="--hostfile")
    others = [name for name in names if name not in here]
    _check_reached(others, port)
    options = [] if port is None else ["--port", str(port)]
    found = [
        Reached(name, _own_address(addresses[other] for other in others), (), is_here=True)
        for name in here
    ]
    return found + [
        Reached(
            name,
            addresses[name],
            (sys.executable, "-m", "dsat.engines.ssh", *options, name),
            is_here=False,
        )
        for name in others
    ]


def _check_reached(names: Sequence[str], port: int | None) -> None:
    """Raises UserInputError unless ssh reaches all hosts and asks nothing."""
    begun = {
        name: subprocess.Popen(  # noqa: S603
            [*_ssh(name, port), "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for name in names
    }
    try:
        for name, process in begun.items():
            try:
                _, said = process.communicate(timeout=_REACH_LIMIT_S)
            except subprocess.TimeoutExpired:
                said = f"no answer within {_REACH_LIMIT_S:g} s"
            if process.returncode != 0:
                why = (said.strip().splitlines() or ["it says nothing"])[-1].strip().rstrip(".")
                command = shlex.join(["ssh", "-o", "BatchMode=yes", name, "true"])
                raise UserInputError(
                    f"ssh does not reach host {name} without a question: {why}",
                    where="--hostfile",
                    hint=f"`{command}` must work: accept the host's key, and give it yours.",
                )
    finally:
        for process in begun.values():
            process.kill()
            process.communicate()


def _ssh(name: str, port: int | None) -> list[str]:
    return [*_SSH, *([] if port is None else ["-p", str(port)]), "--", name]


def _address_of(name: str) -> str:
    """The address that ssh takes a name for; the name itself if only other hosts know it."""
    try:
        told = subprocess.run(  # noqa: S603
            ["ssh", "-G", "--", name],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
            timeout=_REACH_LIMIT_S,
        ).stdout
    except (subprocess.SubprocessError, OSError) as error:
        raise EngineError(f"ssh -G {name} does not tell how the host is reached: {error}") from None
    named = [line.split()[1] for line in told.splitlines() if line.startswith("hostname ")]
    host = named[0] if named else name
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
    except OSError:
        return host


def _is_here(name: str, address: str) -> bool:
    own = socket.gethostname()
    if name in (own, own.partition(".")[0]):  # in /etc/hosts perhaps under 127.0.1.1
        return True
    interfaces = psutil.net_if_addrs().values()
    return any(each.address == address for interface in interfaces for each in interface)


def _own_address(others: Iterable[str]) -> str:
    """The address of this machine by which another host reaches it."""
    for address in others:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((address, _ANY_PORT))  # sends nothing
            return str(probe.getsockname()[0])
    return socket.gethostname()


def _run(name: str, port: int | None, command: Sequence[str]) -> int:
    """Runs a command on a host; returns its exit status."""
    begin = "exec " + shlex.join([sys.executable, "-I", "-S", "-c", _BEGIN])
    process = subprocess.Popen([*_ssh(name, port), begin], stdin=subprocess.PIPE, bufsize=0)  # noqa: S603
    assert process.stdin is not None
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # it is ssh's: whoever reads it sees its end
    told = {"cwd": os.getcwd(), "env": dict(os.environ), "command": list(command)}
    data = json.dumps(told).encode() + b"\n"
    with contextlib.suppress(BrokenPipeError):
        while data:
            while data:
                data = data[process.stdin.write(data) or 0 :]
            data = os.read(0, 65536)
    process.stdin.close()
    return process.wait()


def main() -> int:
    """The command line above."""
    argv, port = sys.argv[1:], None
    if argv[0] == "--port":
        port, argv = int(argv[1]), argv[2:]
    return _run(argv[0], port, argv[1:])


if __name__ == "__main__":
    sys.exit(main())
