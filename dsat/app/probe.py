"""Measure this machine as a card of `dsat project` (`dsat.in_trial.probe`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from dsat.engines.local import ports
from dsat.engines.local.machine import Machine, find_machine
from dsat.errors import DsatError, UserInputError
from dsat.inputs.cards import MEMORY_PART, USUAL_SHAPES, Card, find

HERE = "here"  # the name of a card that is measured
_LIMIT_S = 180.0


def card_here(slots: int) -> Card:
    """Measure so many slots of this machine at once.

    Raises:
        UserInputError: there are not so many.
        DsatError: they cannot be measured.
    """
    machine = find_machine()
    if slots > machine.num_slots and not machine.is_cpu:
        raise UserInputError(
            f"this machine has {machine.describe()}",
            where=f"--to {slots}x{HERE}",
            hint=f"Name the kind of card instead, such as --to {slots}xH100.",
        )
    found = _measured(slots)
    if machine.is_cpu:
        pcie, network, launch_s = found["memory_bandwidth"], found["memory_bandwidth"], 0.0
    else:
        known = _known(machine)
        pcie, network, launch_s = known.pcie_bandwidth, known.network_bandwidth, found["kernel_s"]
    return Card(
        name=f"{found['device']}, measured",
        memory_bytes=machine.memory_bytes // (slots if machine.is_cpu else 1),
        flops={size: found[f"flops_{size}"] for size in (2, 4)},
        matmul=1 / USUAL_SHAPES,
        attention=1.0 if machine.is_cpu else _known(machine).attention,
        memory_bandwidth=found["memory_bandwidth"] / MEMORY_PART,
        link_bandwidth=found.get("link_bandwidth", network),
        pcie_bandwidth=pcie,
        network_bandwidth=network,
        per_host=max(slots, machine.num_slots),
        kernel_s=found["kernel_s"] if machine.is_cpu else Card.kernel_s,
        launch_s=launch_s,
        hop_s=found.get("hop_s", Card.hop_s),
    )


def _known(machine: Machine) -> Card:
    """Return the table's card of this machine's kind, for what cannot be measured in a minute."""
    return find(machine.device_name)


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
    try:
        said = [process.communicate(timeout=_LIMIT_S) for process in processes]
    except subprocess.TimeoutExpired:
        raise DsatError(f"this machine was not measured within {_LIMIT_S:g} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            last = (errors.strip().splitlines() or ["without a word"])[-1]
            raise DsatError(f"this machine could not be measured: {last}")
    measured: dict[str, Any] = json.loads(said[0][0].splitlines()[-1])
    return measured
