"""Network addresses of ranks: loopback on one host, else an address that other hosts reach."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from typing import Any

ADDRESS = "127.0.0.1"
# Variables that make torch's backends use loopback. By default gloo uses the interface of the
# host's name, and NCCL any interface but loopback.
INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
_ANY_PORT = 9


def choose_interface() -> None:
    """Make gloo use the interface that leads to rank 0's address, unless that is loopback.

    By default gloo uses the interface of the host's name, which some /etc/hosts map to loopback.
    """
    master = os.environ.get("MASTER_ADDR", ADDRESS)
    if not is_loopback(master) and (name := interface_to(master)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def interface_to(address: str) -> str:
    """Return the name of the interface by which this host reaches an address; empty if unknown."""
    import psutil

    source = own_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == source for entry in addresses):
            return name
    return ""


def own_address(address: str) -> str:
    """Return this host's IPv4 address on the route to another address; empty if unknown."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _ANY_PORT))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


def is_loopback(host: Any) -> bool:
    """Return whether a host is `localhost` or a loopback address; False for any other name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False
