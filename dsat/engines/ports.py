"""Ports on which the ranks of a trial meet."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

from dsat.errors import EngineError

_ATTEMPTS = 200
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _LAST, _CHOSEN_FROM = 1024, 65535, 12_000


def free_ports(count: int) -> list[int]:
    """Return ports that are free on this machine's loopback interface.

    If possible, the ports lie below the kernel's range for outgoing connections. A connection could
    take a port of that range in the seconds before a rank has started and listens on it.

    Raises:
        EngineError: there are too few free ports.
    """
    first = _FIRST
    with contextlib.suppress(OSError, ValueError):
        first = int(_EPHEMERAL.read_text().split()[0])
    candidates = range(max(_FIRST, first - _CHOSEN_FROM), first)
    if len(candidates) < _ATTEMPTS:  # an administrator has widened the kernel's range
        candidates = range(_FIRST, _LAST + 1)
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for _ in range(_ATTEMPTS):
            sock = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", secrets.choice(candidates)))
                ports.append(int(sock.getsockname()[1]))
            if len(ports) == count:
                return ports
    raise EngineError("no free port found on loopback")
