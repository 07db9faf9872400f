"""Network addresses of ranks: loopback on one host, else an address that other hosts reach."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Any

ADDRESS = "127.0.0.1"
# Variables that make torch's backends use loopback. By default gloo uses the interface of the
# host's name, and NCCL any interface but loopback.
INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
_BACKLOG = 1024
_POSITIONAL = ("host_name", "port", "world_size", "is_master", "timeout")  # in torch up to 2.6
_ANY_PORT = 9


def choose_interface() -> None:
    """Make gloo use the interface that leads to rank 0's address, unless that is loopback.

    By default gloo uses the interface of the host's name, which some /etc/hosts map to loopback.
    """
    master = os.environ.get("MASTER_ADDR", ADDRESS)
    if not is_loopback(master) and (name := interface_to(master)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def open_store(make: Callable[..., Any], args: Any, options: dict[str, Any]) -> Any:
    """Make a `TCPStore`, which listens on loopback only if its address is a loopback address.

    By default it listens on all interfaces (torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp),
    but it accepts a socket that already listens.
    """
    options = {**options, **dict(zip(_POSITIONAL, args, strict=False))}
    host, port = options.get("host_name"), options.get("port")
    if options.get("is_master") and port and is_loopback(host):
        options["use_libuv"] = False
        family = socket.AF_INET6 if ":" in str(host) else socket.AF_INET
        with socket.create_server((host, port), family=family, backlog=_BACKLOG) as listening:
            options.setdefault("master_listen_fd", os.dup(listening.fileno()))
    return make(**options)


def interface_to(address: str) -> str:
    """Return the name of the interface by which this host reaches an address; empty if unknown."""
    import psutil

    own = own_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and each.address == own for each in addresses):
            return name
    return ""


def own_address(other: str) -> str:
    """Return this host's IPv4 address on the route to another address; empty if unknown."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect((other, _ANY_PORT))  # sends nothing
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
