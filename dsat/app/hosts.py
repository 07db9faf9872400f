"""On which hosts trials run: this machine, those of a hostfile, all nodes of the Slurm allocation
around it, or what is free of a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dsat.engines import ssh
from dsat.engines.local import Host, find_machine, find_machines
from dsat.engines.ray import Reservation, Wish, is_job
from dsat.engines.slurm import Allocation
from dsat.errors import UserInputError
from dsat.inputs.entrypoint import Entrypoint

_log = logging.getLogger(__name__)
# Of memory, in which two devices of one kind differ by what their firmware keeps.
_EQUAL_WITHIN = 0.02


def _nothing() -> None:
    """There is nothing to give back."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run.

    Attributes:
        first: those that there are when it begins.
        release: gives back what of them was reserved, when no more is run there.
    """

    first: tuple[Host, ...]
    release: Callable[[], None] = field(default=_nothing, compare=False)

    def only(self, wanted: Sequence[int], without: Sequence[int]) -> Hosts:
        """The hosts with some of their devices alone; see `Machine.only`."""
        if not (wanted or without):
            return self
        hosts = (replace(host, machine=host.machine.only(wanted, without)) for host in self.first)
        return replace(self, first=tuple(hosts))


def find_hosts(
    engine: str,
    num_nodes: int | None = None,
    program: Entrypoint | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    gpus_per_node: str | None = None,
    ray_address: str | None = None,
) -> Hosts:
    """The hosts where trials run, for whoever releases them in the end.

    Args:
        engine: `slurm` for the nodes of the allocation; `ray` for what is free of the cluster;
            `auto` for the machines that the program's launcher is given, or else for the cluster
            whose job this is, or for the allocation's nodes if there is more than one.
        num_nodes: so many are expected in the allocation, or wanted of the cluster, if anything is.
        program: what is run.
        meanwhile: called now and then while hosts are looked for; what it raises ends that.
        gpus_per_node: of a Ray cluster; None for as many as are free.
        ray_address: of the cluster; None for the one that Ray finds.

    Raises:
        UserInputError: there is no allocation, or hosts are not equal, or cannot be reached.
        EngineError: the accelerators of a host cannot be found, or Ray gives nothing.
    """
    if engine == "auto" and program is not None and program.hosts:
        return _of_hostfile(dict(program.hosts), program.ssh_port)
    if engine == "ray" or (engine == "auto" and is_job(os.environ)):
        why = (
            ""
            if engine == "ray"
            else ": this is a Ray job (--engine local takes its machine alone)"
        )
        return _of_ray(ray_address, Wish.of(num_nodes, gpus_per_node), why, meanwhile)
    allocation = Allocation.of(os.environ) if engine in ("auto", "slurm") else None
    if engine == "slurm" and allocation is None:
        raise UserInputError(
            "is for the inside of a Slurm allocation, and SLURM_JOB_ID and SLURM_JOB_NODELIST are "
            "not set",
            where="--engine slurm",
            hint="Start dsat in a job script (sbatch), or after salloc.",
        )
    if allocation is not None and num_nodes not in (None, allocation.count):
        raise UserInputError(
            f"the Slurm allocation around dsat has {allocation.count} nodes",
            where=f"--nodes {num_nodes}",
            hint="Leave it out there: it is for a job that dsat submits.",
        )
    if allocation is None or (allocation.count == 1 and allocation.node):
        return Hosts((Host(find_machine(meanwhile)),))
    why = "--engine slurm" if engine == "slurm" else "--engine local takes this machine alone"
    _log.info(
        "tuning on the %d nodes of Slurm job %s, %s (%s)",
        allocation.count,
        allocation.job,
        allocation.nodes,
        why,
    )
    nodes = allocation.find_nodes()
    machines = find_machines({node.name: node.prefix for node in nodes})
    hosts = [
        Host(machine, node.name, node.prefix, node.address, is_here=node.is_here)
        for node, machine in zip(nodes, machines, strict=True)
    ]
    check_equal(hosts)
    return Hosts(tuple(hosts))


def _of_ray(address: str | None, wish: Wish, why: str, meanwhile: Callable[[], None]) -> Hosts:
    """What is free of a cluster, reserved."""
    given = address or os.environ.get("RAY_ADDRESS", "")
    if given.startswith("ray://"):
        raise UserInputError(
            f"{given} is for Ray Client, from outside of a cluster",
            where="--engine ray",
            hint="Start dsat on a node of it, or as a job: ray job submit -- python3 -m dsat ...",
        )
    reserved = Reservation(address, wish, say=_log.info, meanwhile=meanwhile)
    try:
        _log.info("tuning on what Ray has free, %s%s", reserved.text, why)
        prefixes = {node.name: node.prefix for node in reserved.nodes}
        machines = find_machines(prefixes, meanwhile)
        hosts = tuple(
            Host(machine, node.name, node.prefix, node.address, is_here=node.is_here)
            for node, machine in zip(reserved.nodes, machines, strict=True)
        )
        check_equal(hosts)
    except BaseException:
        reserved.end()
        raise
    return Hosts(hosts, reserved.end)


def _of_hostfile(positions: Mapping[str, tuple[int, ...]], port: int | None) -> Hosts:
    """Hosts by their names, with the positions of the devices that are used there; none for all."""
    _log.info(
        "tuning on the machines of the hostfile, %s (--engine local takes this machine alone)",
        ", ".join(positions),
    )
    reached = ssh.reach(list(positions), port)
    machines = find_machines({host.name: host.prefix for host in reached})
    hosts = [
        Host(
            machine.only(positions[host.name], ()),
            host.name,
            host.prefix,
            host.address,
            is_here=host.is_here,
        )
        for host, machine in zip(reached, machines, strict=True)
    ]
    check_equal(hosts)
    return Hosts(tuple(hosts))


def check_equal(hosts: Sequence[Host]) -> None:
    """Raises UserInputError unless a trial is the same on any of the hosts."""
    first = hosts[0]
    for other in hosts[1:]:
        one, two = first.machine, other.machine
        alike = min(one.memory_bytes, two.memory_bytes) >= (1 - _EQUAL_WITHIN) * max(
            one.memory_bytes, two.memory_bytes
        )
        slots_differ = (one.accelerator, one.num_slots, one.device_name) != (
            two.accelerator,
            two.num_slots,
            two.device_name,
        )
        if slots_differ or not alike:
            has, differs = one.describe(), two.describe()
        elif one.software != two.software:
            has, differs = ", ".join(one.software), ", ".join(two.software)
        elif len(one.cores) != len(two.cores):
            has, differs = (f"{len(each.cores)} processor cores" for each in (one, two))
        else:
            continue
        raise UserInputError(
            f"host {first.name} has {has}, and host {other.name} has {differs}",
            where="hosts",
            hint="Trials on unequal hosts cannot be compared: take equal ones, or --engine local.",
        )


def describe(hosts: Sequence[Host]) -> str:
    """What the hosts have, for people."""
    machine = hosts[0].machine
    if len(hosts) == 1:
        return machine.describe()
    names = ", ".join(host.name for host in hosts)
    return f"{len(hosts)} hosts ({names}), each with {machine.describe()}"


def all_slots(hosts: Sequence[Host], program: Entrypoint) -> int:
    """Slots that a launcher starts ranks on which is told no number: of the machines that it is
    given, or of one."""
    return hosts[0].machine.num_slots * (len(hosts) if program.hosts else 1)


def check_slots(hosts: Sequence[Host], slots: int, *, where: str) -> None:
    """Raises UserInputError if there is no place for a trial of so many slots."""
    each = hosts[0].machine.num_slots
    most = each * len(hosts)
    if slots <= each or (slots <= most and slots % each == 0):
        return
    if len(hosts) == 1:
        raise UserInputError(
            f"a trial needs {slots} slots, and this machine has {describe(hosts)}",
            where=where,
            hint=f"Use --slots {most} or another machine.",
        )
    raise UserInputError(
        f"a trial needs {slots} slots, and there are {describe(hosts)}",
        where=where,
        hint=f"A trial has slots of one host, or whole hosts: up to {each}, or a multiple of it up "
        f"to {most}.",
    )
