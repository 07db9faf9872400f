"""Measure this machine as a card of `dsat project` (`dsat.in_trial.probe`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from dsat.engines.local import ports
from dsat.engines.local.machine import find_machine
from dsat.errors import DsatError, UserInputError
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
    found = _measured(slots)
    memory_bandwidth = found["memory_bandwidth"]
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
        per_host=max(slots, machine.num_slots),
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
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "dsat.in_trial.probe"],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(slots)
    ]
    limit_s = time.monotonic() + _LIMIT_S
    try:
        # A rank that fails leaves the others waiting for it.
        while any(p.poll() is None for p in processes) and not any(p.returncode for p in processes):
            if time.monotonic() > limit_s:
                raise DsatError(f"this machine was not measured within {_LIMIT_S:g} s")
            time.sleep(_LOOK_EVERY_S)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        said = [process.communicate() for process in processes]
    ended = zip(processes, said, strict=True)
    # Not one of those that were killed for it.
    for process, (_, errors) in sorted(ended, key=lambda each: -each[0].returncode):
        if process.returncode:
            last = (errors.strip().splitlines() or ["without a word"])[-1]
            raise DsatError(f"this machine could not be measured: {last}")
    measured: dict[str, Any] = json.loads(said[0][0].splitlines()[-1])
    return measured
