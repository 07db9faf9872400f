"""Machines of a hostfile, which are reached with ssh."""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil

from dsat.engines.local.hosts import Host
from dsat.engines.places.base import Environment, Node, hosts_on
from dsat.engines.ssh_run import ssh_to
from dsat.errors import EngineError, UserInputError
from dsat.in_trial import loopback

_log = logging.getLogger(__name__)
_REACH_LIMIT_S = 60.0


def detect(environment: Environment) -> bool:
    """Return whether the command's launcher is given a hostfile."""
    return bool(environment.hostfile)


@contextlib.contextmanager
def acquire(environment: Environment, given: Mapping[str, Any]) -> Iterator[list[Host]]:
    """Return the machines of that hostfile."""
    positions = environment.hostfile
    if not positions:
        raise UserInputError(
            "is for a command with a hostfile",
            where="--engine ssh",
            hint="As in: -- deepspeed --hostfile hosts train.py ...",
        )
    _log.info("tuning on the machines of the hostfile, %s", ", ".join(positions))
    hosts = hosts_on(reach(list(positions), environment.ssh_port))
    meeting = {next(iter(positions)): environment.master_address}
    yield [
        replace(
            host,
            machine=host.machine.at(positions[host.name]),
            address=meeting.get(host.name) or host.address,
        )
        for host in hosts
    ]


def reach(names: Sequence[str], port: int | None) -> list[Node]:
    """Return the hosts of these names; the one that this process runs on comes first.

    Args:
        names: as the user has written them.
        port: of their ssh servers; None for the one that ssh is configured for.

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
    found = (loopback.own_address(addresses[other]) for other in others)
    own_address = next(filter(None, found), socket.gethostname())
    options = [] if port is None else ["--port", str(port)]
    run = (sys.executable, "-m", "dsat.engines.ssh_run", *options)
    return [
        *(Node(name, own_address, (), is_here=True) for name in here),
        *(Node(name, addresses[name], (*run, name), is_here=False) for name in others),
    ]


def _check_reached(names: Sequence[str], port: int | None) -> None:
    """Raise UserInputError unless ssh reaches all hosts and asks nothing."""
    begun = {
        name: subprocess.Popen(  # noqa: S603
            [*ssh_to(name, port), "true"],
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
                _, errors = process.communicate(timeout=_REACH_LIMIT_S)
            except subprocess.TimeoutExpired:
                errors = f"no answer within {_REACH_LIMIT_S:g} s"
            if process.returncode != 0:
                why = (
                    (errors.strip().splitlines() or ["it printed nothing"])[-1].strip().rstrip(".")
                )
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


def _address_of(name: str) -> str:
    """Return the address that ssh takes a name for; the name itself if only other hosts know it."""
    try:
        configured = subprocess.run(  # noqa: S603
            ["ssh", "-G", "--", name],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
            timeout=_REACH_LIMIT_S,
        ).stdout
    except (subprocess.SubprocessError, OSError) as error:
        raise EngineError(
            f"`ssh -G {name}` failed, which shows how the host is reached: {error}"
        ) from None
    named = [line.split()[1] for line in configured.splitlines() if line.startswith("hostname ")]
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
