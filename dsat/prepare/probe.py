"""Measure this machine as a card of `dsat project` (`dsat.in_trial.probe`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsat.engines import ports
from dsat.engines.machines.machine import Machine, find_machine
from dsat.errors import DsatError, UserInputError
from dsat.inputs import cards
from dsat.inputs.cards import MEMORY_PART, Card

HERE = "here"  # the name of a card that is measured
_LIMIT_S, _LOOK_EVERY_S = 180.0, 0.1
_SHARING = 2  # ranks of a CPU that share a slot's cores, at most


def card_here(slots: int) -> Card:
    """Measure so many slots of this machine at once.

    Raises:
        UserInputError: there are not so many.
        DsatError: they cannot be measured.
    """
    machine = find_machine()
    if slots > machine.num_slots * (_SHARING if machine.is_cpu else 1):
        raise UserInputError(
            f"this machine has {machine.describe()}",
            where=f"--to {slots}x{HERE}",
            hint=f"Name the kind of card instead, such as --to {slots}xH100.",
        )
    if machine.accelerator not in ("cpu", "cuda"):
        raise UserInputError(
            f"{machine.accelerator} slots cannot be measured",
            where=f"--to {slots}x{HERE}",
            hint="Describe the card in a file and name it with --cards.",
        )
    return card_of(_measured(slots), machine, slots)


def card_of(found: Mapping[str, Any], machine: Machine, slots: int) -> Card:
    """Return the card that was measured; its host's memory is that of the table of cards."""
    memory_bandwidth = found["memory_bandwidth"]
    usual = None if machine.is_cpu else cards.of_device(found["device"])
    per_host = max(slots, machine.num_slots)
    return Card(
        name=f"{found['device']}, measured",
        memory_bytes=machine.memory_bytes // (slots if machine.is_cpu else 1),
        flops={size: found[f"flops_{size}"] for size in (2, 4)},
        matmul=1.0,
        attention=found["attention"],
        memory_bandwidth=memory_bandwidth / MEMORY_PART,
        link_bandwidth=found.get("link_bandwidth", memory_bandwidth),
        pcie_bandwidth=found.get("pcie_bandwidth", memory_bandwidth),
        network_bandwidth=memory_bandwidth,  # of no other host
        per_host=per_host,
        host_cores=min(len(machine.cores), machine.threads) / machine.num_slots,
        host_bandwidth=usual.host_bandwidth * usual.per_host / per_host
        if usual
        else Card.host_bandwidth,
        kernel_s=found["kernel_s"] if machine.is_cpu else Card.kernel_s,
        launch_s=0.0 if machine.is_cpu else found["kernel_s"],
        protocols=((1.0, found["hop_s"], found["hop_s"]),) if slots > 1 else Card.protocols,
    )


def _measured(slots: int) -> dict[str, Any]:
    variables = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports.free_ports(1)[0]),
        "WORLD_SIZE": str(slots),
    }
    with tempfile.TemporaryDirectory() as above:
        processes = []
        for rank in range(slots):
            out, errors = (Path(above) / f"{rank}.{name}" for name in ("out", "err"))
            with out.open("w") as said, errors.open("w") as wrong:
                process = subprocess.Popen(
                    [sys.executable, "-m", "dsat.in_trial.probe"],
                    env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=said,
                    stderr=wrong,
                )
            processes.append(process)
        failed = _first_failed(processes)
        if failed is not None:
            lines = (Path(above) / f"{failed}.err").read_text(errors="replace").splitlines()
            last = next(filter(None, map(str.strip, reversed(lines))), "without a word")
            raise DsatError(f"this machine could not be measured: {last}")
        measured: dict[str, Any] = json.loads((Path(above) / "0.out").read_text().splitlines()[-1])
    return measured


def _first_failed(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all have ended, or one has failed; return its position.

    A rank that fails leaves the others waiting for it.
    """
    limit_s = time.monotonic() + _LIMIT_S
    try:
        while any(p.poll() is None for p in processes) and not any(p.returncode for p in processes):
            if time.monotonic() > limit_s:
                raise DsatError(f"this machine was not measured within {_LIMIT_S:g} s")
            time.sleep(_LOOK_EVERY_S)
        return next((rank for rank, p in enumerate(processes) if p.returncode), None)
    finally:
        for process in processes:
            process.kill()
            process.wait()
