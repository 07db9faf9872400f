"""The address on which the ranks of one host meet."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from dsat.engines.ports import free_ports
from dsat.in_trial import loopback
from dsat.in_trial.adapters import torch_calls
from dsat.in_trial.adapters.calls import Call
from dsat.in_trial.adapters.trial import TRIAL

IPV6 = Path("/proc/net/if_inet6")
WITH_IPV6 = pytest.mark.skipif(
    not IPV6.exists() or " lo\n" not in IPV6.read_text(), reason="needs IPv6"
)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", pytest.param("::1", marks=WITH_IPV6)])
def test_a_store_of_one_host_listens_on_loopback_only(host: str) -> None:
    def address(master_listen_fd: int | None = None, **_: Any) -> str:
        assert master_listen_fd is not None, "torch would listen on all interfaces"
        with socket.socket(fileno=master_listen_fd) as listening:
            return str(listening.getsockname()[0])

    arguments = (host, free_ports(1)[0])
    call = Call(TRIAL, address, "TCPStore", None, arguments, {"is_master": True})
    assert loopback.is_loopback(torch_calls.open_store(call))
