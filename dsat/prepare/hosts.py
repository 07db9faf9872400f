"""Choice and checks of the hosts where trials run."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.command.entrypoint import DEEPSPEED, Entrypoint
from dsat.command.placement import VISIBLE
from dsat.engines.machines.accelerators import NAMED, find_chosen_devices
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import are_close
from dsat.engines.places import PROVIDERS
from dsat.engines.places.base import Environment
from dsat.errors import UserInputError
from dsat.values import format as fmt


@contextlib.contextmanager
def acquire_hosts(
    engine: str,
    program: Entrypoint | None = None,
    given: Mapping[str, Any] | None = None,
    in_use: Mapping[str, str] | None = None,
) -> Iterator[tuple[Host, ...]]:
    """Acquire hosts where trials run, check them, and release them afterwards.

    Args:
        engine: value of `--engine`; if it is not one of `PROVIDERS`, the host is this machine.
        program: program whose launcher may choose devices.
        given: options of the provider, by keyword.
        in_use: result of `accelerators.variables_of_memory_in_use` before the command began.

    Raises:
        UserInputError: the hosts differ, or one has devices of several kinds.
    """
    program = program or Entrypoint()
    launch = program.launch
    devices = {name: value for name, value in program.env.items() if name in VISIBLE}
    variables = {**os.environ, **devices, **(in_use or {})}
    names = [_names(positions, variables) for positions in (launch.devices, launch.not_devices)]
    variables[NAMED] = ",".join(names[0])
    place = PROVIDERS[engine if engine in PROVIDERS else "local"]
    with place.acquire(Environment(variables, launch), given or {}) as hosts:
        check_equal(hosts)
        if any(names):
            hosts = [replace(host, machine=host.machine.only(*names)) for host in hosts]
        for host in hosts:
            check_kinds(host)
        yield tuple(hosts)


def _names(positions: Sequence[int], variables: Mapping[str, str]) -> list[str]:
    devices = find_chosen_devices(VISIBLE, variables)
    return [devices[n] if n < len(devices) else str(n) for n in positions]


def check_equal(hosts: Sequence[Host]) -> None:
    """Raise UserInputError unless all hosts have equal devices, software and numbers of cores."""
    first = hosts[0]
    for other in hosts[1:]:
        one, two = first.machine, other.machine
        slots = [(m.accelerator, m.num_slots, m.device_name) for m in (one, two)]
        if slots[0] != slots[1] or not are_close(one.memory_bytes, two.memory_bytes):
            has, differs = one.describe(), two.describe()
        elif one.device_names != two.device_names:
            has, differs = (", ".join(m.device_names) for m in (one, two))
        elif one.software != two.software:
            has, differs = ", ".join(one.software), ", ".join(two.software)
        elif len(one.cores) != len(two.cores):
            has, differs = (f"{len(m.cores)} CPU cores" for m in (one, two))
        else:
            continue
        raise UserInputError(
            f"host {first.name} has {has}, but host {other.name} has {differs}",
            where="hosts",
            hint="Trials on unequal hosts cannot be compared: use equal hosts, or --engine local.",
        )


def check_kinds(host: Host) -> None:
    """Raise UserInputError if a host has different kinds of devices."""
    machine = host.machine
    groups = machine.devices_by_kind()
    if len(groups) > 1:
        kinds = "; ".join(f"{kind}: {', '.join(devices)}" for kind, devices in groups.items())
        [variable, *_] = machine.visible_devices
        [largest, *_] = sorted(groups.values(), key=len, reverse=True)
        raise UserInputError(
            f"has devices of several kinds ({kinds}), on which trials cannot be compared",
            where=host.name or "this machine",
            hint=f"Choose one kind: {variable}={','.join(largest)}",
        )


def extend_slots(hosts: Sequence[Host], slots: int) -> tuple[Host, ...]:
    """Return hosts with enough CPU slots for a trial, even beyond the quota of cores."""
    share = -(-slots // len(hosts))
    return tuple(replace(host, machine=host.machine.extend(share)) for host in hosts)


def describe(hosts: Sequence[Host]) -> str:
    """Describe the hosts for messages."""
    machine = hosts[0].machine
    if len(hosts) == 1:
        where = "" if hosts[0].is_here else f"1 host ({hosts[0].name}) with "
        return f"{where}{machine.describe()}"
    names = ", ".join(host.name for host in hosts)
    return f"{len(hosts)} hosts ({names}), each with {machine.describe()}"


def all_slots(hosts: Sequence[Host], program: Entrypoint) -> int:
    """Return the number of ranks that a launcher starts by default, usually one per device."""
    launch, machine = program.launch, hosts[0].machine
    if machine.is_cpu and program.launcher == DEEPSPEED and not launch.hosts:
        return _numa_ranks()
    return machine.num_slots * (len(hosts) if launch.hosts else launch.nodes)


def _numa_ranks(nodes: Path = Path("/sys/devices/system/node")) -> int:
    """Return the number of ranks that DeepSpeed's launcher starts on a CPU: one per NUMA node.

    This follows `CPU_Accelerator.device_count` (0.19.8): LOCAL_SIZE if set, 1 without numactl.
    """
    local_size = os.environ.get("LOCAL_SIZE", "")
    if local_size.isdecimal() and int(local_size):
        return int(local_size)
    if shutil.which("numactl") is None:
        return 1
    return sum(bool(path.read_text().strip()) for path in nodes.glob("node*/cpulist")) or 1


def check_slots(hosts: Sequence[Host], slots: int, *, where: str) -> None:
    """Raise UserInputError if the hosts cannot run a trial on this number of devices."""
    per_host = hosts[0].machine.num_slots
    most = per_host * len(hosts)
    if slots <= per_host or (slots <= most and slots % per_host == 0):
        return
    hint = f"Use --devices {most} or another machine."
    if len(hosts) > 1:
        hint = (
            f"A trial runs on one host (up to {per_host} devices) or on whole hosts (a multiple of "
            f"{per_host}, up to {most})."
        )
    raise UserInputError(
        f"a trial needs {fmt.count(slots, 'device')}, but there are {describe(hosts)}",
        where=where,
        hint=hint,
    )
