"""Adapters of PyTorch's functions that measure a script, or limit its memory and network."""

from __future__ import annotations

import os
import socket
from typing import Any

from dsat.in_trial.adapters.calls import Call
from dsat.in_trial.loopback import is_loopback

_BACKLOG = 1024
_POSITIONAL = ("host_name", "port", "world_size", "is_master", "timeout")  # in torch up to 2.6


def backward(call: Call) -> Any:
    """Record the loss, if the script calls `loss.backward()` itself."""
    meter = call.trial.meter
    if meter is not None and meter.losses is not None:
        meter.losses.add_script_loss(call.argument("tensors", 0))  # from `Tensor.backward` too
    return call.proceed()


def build_model(call: Call) -> None:
    """On CPUs, apply `--slot-memory` from the first model on, so that imports do not count."""
    act, call.trial.calls.before_model = call.trial.calls.before_model, None
    if act is not None:
        act()
    call.proceed()


def open_store(call: Call) -> Any:
    """Listen on loopback only, if the address of rank 0 is a loopback address.

    By default a `TCPStore` listens on all interfaces (TCPStoreLibUvBackend.cpp in torch's
    csrc/distributed/c10d), but it accepts a socket that already listens.
    """
    options = {**call.kwargs, **dict(zip(_POSITIONAL, call.args, strict=False))}
    host, port = options.get("host_name"), options.get("port")
    if options.get("is_master") and port and is_loopback(host):
        options["use_libuv"] = False
        family = socket.AF_INET6 if ":" in str(host) else socket.AF_INET
        with socket.create_server((host, port), family=family, backlog=_BACKLOG) as listening:
            options.setdefault("master_listen_fd", os.dup(listening.fileno()))
    return call.proceed_with(**options)
