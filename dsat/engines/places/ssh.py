"""Place: the machines of a hostfile, reached with ssh."""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import psutil

from dsat.engines.machines.hosts import Host
from dsat.engines.places.base import Environment, inspect_machines
from dsat.engines.places.ssh_run import ssh_to
from dsat.errors import EngineError, UserInputError
from dsat.in_trial import loopback

_log = logging.getLogger(__name__)
_REACH_LIMIT_S = 60.0
# A shell command that prints two words, which no other host or container prints.
_IDENTIFY = "cat /proc/sys/kernel/random/boot_id; uname -n"
_PROXIES = {"proxyjump", "proxycommand"}
_REFUSALS = ("Permission denied", "Host key verification failed")


def detect(environment: Environment) -> bool:
    """Return whether the command's launcher uses a hostfile."""
    return bool(environment.launch.hosts)


@contextlib.contextmanager
def acquire(environment: Environment, given: Mapping[str, Any]) -> Iterator[list[Host]]:
    """Yield the machines of the launcher's hostfile, with the devices that it selects."""
    launch = environment.launch
    positions = dict(launch.hosts)
    if not positions:
        raise UserInputError(
            "needs a command with a hostfile",
            where="--engine ssh",
            hint="For example: dsat tune deepspeed --hostfile hosts train.py ...",
        )
    _log.info("tuning on the machines of the hostfile, %s", ", ".join(positions))
    hosts = inspect_machines(reach(list(positions), launch.ssh_port))
    for host in hosts:
        devices = positions[host.name]
        if devices and max(devices) >= host.machine.num_slots:
            raise UserInputError(
                f"chooses devices {', '.join(map(str, devices))} of host {host.name}, but it has "
                f"{host.machine.describe()}",
                where="--hostfile",
            )
    meeting = {next(iter(positions)): launch.master_address}
    yield [
        replace(
            host,
            machine=host.machine.at(positions[host.name]),
            address=meeting.get(host.name) or host.address,
        )
        for host in hosts
    ]


def reach(names: Sequence[str], port: int | None) -> list[Host]:
    """Return the hosts with these names; the host of this process, if named, comes first.

    Raises:
        UserInputError: ssh is missing, fails or asks for input; or two names mean this machine;
            or ranks on other hosts cannot reach a host.
        EngineError: `ssh -G` fails.
    """
    if shutil.which("ssh") is None:
        raise UserInputError("needs ssh, which is not installed", where="--hostfile")
    ways = {name: _find_address(name, port) for name in names}
    interfaces = psutil.net_if_addrs().values()
    local_addresses = {entry.address for interface in interfaces for entry in interface}
    host_name = socket.gethostname()  # /etc/hosts may give it the address 127.0.1.1
    here = [
        name
        for name, (address, is_direct) in ways.items()
        if name in (host_name, host_name.partition(".")[0])
        or (is_direct and address in local_addresses)
    ]
    commands = {name: ssh_to(name, port) for name in names if name not in here}
    identities = _identify_all({"": ["sh", "-c"], **commands})
    here += [
        name
        for name in commands
        if ways[name][0] in local_addresses and identities[name] == identities[""]
    ]
    if len(here) > 1:
        raise UserInputError(
            f"lists this machine twice: {', '.join(here)}",
            where="--hostfile",
            hint="Keep one of these names.",
        )
    remote = {name: address for name, (address, _) in ways.items() if name not in here}
    for name, address in remote.items():
        if address in local_addresses and len(names) > 1:
            raise UserInputError(
                f"ssh reaches host {name} at {address}, an address of this machine, so other hosts "
                f"cannot find {name}",
                where="--hostfile",
                hint="Set its own address as HostName in ~/.ssh/config, with ProxyJump if needed.",
            )
    own_address = next(filter(None, map(loopback.own_address, remote.values())), host_name)
    options = [] if port is None else ["--port", str(port)]
    run = (sys.executable, "-m", "dsat.engines.places.ssh_run", *options)
    return [
        *(Host(name=name, address=own_address) for name in here),
        *(
            Host(name=name, reach=(*run, name), address=address, is_here=False)
            for name, address in remote.items()
        ),
    ]


def _identify_all(prefixes: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return each host's boot ID and node name, from a command run with the host's prefix.

    Raises:
        UserInputError: a host does not answer, or ssh needs a password.
    """
    processes = {
        name: subprocess.Popen(  # noqa: S603
            [*prefix, _IDENTIFY],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for name, prefix in prefixes.items()
    }
    with ThreadPoolExecutor(len(processes)) as pool:
        answers = {
            name: pool.submit(_identify, name, process) for name, process in processes.items()
        }
        try:
            for answer in as_completed(answers.values()):
                answer.result()
        finally:  # after a refusal, the others may wait for long
            for process in processes.values():
                process.kill()
    return {name: answer.result() for name, answer in answers.items()}


def _identify(name: str, process: subprocess.Popen[str]) -> list[str]:
    errors = f"no answer within {_REACH_LIMIT_S:g} s"
    with contextlib.suppress(subprocess.TimeoutExpired):
        output, errors = process.communicate(timeout=_REACH_LIMIT_S)
        if process.returncode == 0:
            return output.split()[-2:]  # a login shell may print other words before
    reason = (errors.strip().splitlines() or ["it printed nothing"])[-1].strip().rstrip(".")
    command = shlex.join(["ssh", "-o", "BatchMode=yes", name, "true"])
    keys = ": accept the host's key, and run ssh-copy-id"
    is_refused = any(refusal in reason for refusal in _REFUSALS)
    raise UserInputError(
        f"ssh cannot log in to host {name} without a prompt: {reason}",
        where="--hostfile",
        hint=f"`{command}` must work{keys if is_refused else ''}.",
    )


def _find_address(name: str, port: int | None) -> tuple[str, bool]:
    """Return the address that ssh uses for a host, and whether it surely belongs to the host.

    If ssh uses a proxy, or a port other than 22, which may be forwarded, the address may belong to
    another host. If this machine cannot resolve the name, the address is the name.
    """
    try:
        output = subprocess.run(  # noqa: S603
            ["ssh", "-G", *([] if port is None else ["-p", str(port)]), "--", name],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
            timeout=_REACH_LIMIT_S,
        ).stdout
    except (subprocess.SubprocessError, OSError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        raise EngineError(
            f"`ssh -G {name}`, which shows how to reach the host, failed: {reason}"
        ) from None
    options = dict(line.split(maxsplit=1) for line in output.splitlines() if " " in line)
    host = options.get("hostname", name)
    is_direct = options.get("port") in (None, "22") and not _PROXIES & options.keys()
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]), is_direct
    except (OSError, UnicodeError):  # only other hosts resolve the name, or it is invalid
        return host, is_direct
