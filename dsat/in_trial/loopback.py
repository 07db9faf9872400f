"""Keeps the ranks of a single machine among themselves: what they listen on is loopback."""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import sys
from typing import Any

# Which interface torch's backends meet on. By themselves gloo takes the one that the host's name
# stands for, and NCCL any that is not loopback.
INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
_BACKLOG = 1024


def install() -> None:
    """Has rank 0's store listen where the others look for it, and nowhere else.

    torch's own listens on all interfaces (torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp),
    but takes a socket that listens already.
    """
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    make = rendezvous.TCPStore

    @functools.wraps(make)
    def store(*args: Any, **options: Any) -> Any:
        host, port = options.get("host_name"), options.get("port")
        if options.get("is_master") and port and _is_loopback(host):
            listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen(_BACKLOG)
            options.setdefault("master_listen_fd", os.dup(listening.fileno()))
            listening.close()
        return make(*args, **options)

    rendezvous.TCPStore = store


def _is_loopback(host: Any) -> bool:
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False
