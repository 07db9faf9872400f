"""Environment variables and CPU cores of ranks, the same in trials and in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsat.command.entrypoint import Entrypoint
from dsat.engines.machines.hosts import Share
from dsat.engines.machines.machine import Machine
from dsat.values.zero_strategy import read_strategy

# Without expandable segments, an allocation can fail because of fragmentation, although enough
# memory is free in total. All versions of torch read this variable.
_ALLOCATOR_SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
_ALLOCATOR_VARIABLES = {*_ALLOCATOR_SETTINGS, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}


def make_command_settings(machine: Machine, user_env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that affect memory and speed, for a command that starts its ranks.

    On a CPU, where slots are cores, they include the number of threads. On other devices, the
    command's launcher sets that number. `user_env`: the command's own variables, which are kept.
    """
    settings = {"OMP_NUM_THREADS": "1"} if machine.is_cpu else {}
    if machine.expandable_segments and not _ALLOCATOR_VARIABLES & user_env.keys():
        settings.update(_ALLOCATOR_SETTINGS)
    return settings


def make_rank_settings(
    machine: Machine,
    program: Entrypoint,
    config: Mapping[str, Any],
    ranks: int,
    user_env: Mapping[str, str],
) -> dict[str, str]:
    """Return variables that affect memory and speed, for ranks that dsat starts.

    Args:
        ranks: number of ranks on each host.
        user_env: the user's variables, which are kept. Only OMP_NUM_THREADS is replaced on a CPU,
            where slots are cores, and for ranks that are bound to cores.
    """
    settings = make_command_settings(machine, user_env)
    sharers = _sharers(machine, config, ranks)
    if machine.is_cpu:
        return settings
    if program.launch.binds_cores:  # DeepSpeed's launcher replaces the user's number, too
        share = select_cores(_shared_cores(machine, program), 0, sharers)
        settings["OMP_NUM_THREADS"] = str(len(share))
    elif "OMP_NUM_THREADS" not in user_env:
        as_torchrun = not program.launch.passes_local_rank
        if as_torchrun and ranks > 1 and not read_strategy(config).offloads:
            settings["OMP_NUM_THREADS"] = "1"
        elif sharers > 1:
            settings["OMP_NUM_THREADS"] = str(max(1, machine.threads // sharers))
    return settings


def binding_options(
    machine: Machine, program: Entrypoint, config: Mapping[str, Any], ranks: int
) -> list[str]:
    """Return the options of DeepSpeed's launcher that bind ranks to as many cores as in trials."""
    sharers, cores = _sharers(machine, config, ranks), sorted(program.launch.core_list)
    if sharers > ranks:
        shared_cores = _shared_cores(machine, program)
        shares = [select_cores(shared_cores, rank, sharers) for rank in range(ranks)]
        cores = sorted(core for share in shares for core in share)
    core_list = ["--bind_core_list", ",".join(map(str, cores))] if cores else []
    return ["--bind_cores_to_rank", *core_list]


def find_cores(
    share: Share, local_rank: int, program: Entrypoint, config: Mapping[str, Any]
) -> list[int]:
    """Return the cores to which a rank is bound; empty if it may use all cores."""
    machine, ranks = share.host.machine, share.ranks
    if machine.has_quota:
        return []
    if machine.is_cpu:
        # All ranks share the cores of the trial, as under `taskset` when the user trains by hand.
        return [int(machine.devices[slot]) for slot in share.slots]
    if not (program.launch.binds_cores and share.slots):
        return []
    # Trials may run at the same time, so the cores belong to the slots.
    sharers = _sharers(machine, config, ranks)
    place = local_rank if sharers == ranks else share.slots[local_rank]
    return select_cores(_shared_cores(machine, program), place, sharers)


def select_cores(cores: Sequence[int], place: int, sharers: int) -> list[int]:
    """Select adjacent cores for one of several ranks that share them.

    If all NUMA nodes have equal numbers of ranks, a rank's cores are in one node. So is its memory,
    since Linux allocates a page on the node that first touches it.

    Args:
        place: the rank's position among the sharers.
        sharers: number of ranks that share the cores.
    """
    share = max(1, len(cores) // sharers)
    place %= max(1, len(cores) // share)  # with more ranks than cores, some ranks share a core
    return list(cores[place * share : (place + 1) * share])


def _shared_cores(machine: Machine, program: Entrypoint) -> Sequence[int]:
    return program.launch.core_list or machine.cores


def _sharers(machine: Machine, config: Mapping[str, Any], ranks: int) -> int:
    """Return the number of ranks that share the cores of a host, counting all concurrent trials.

    A trial that offloads runs alone on its hosts, because its optimizer uses the cores.
    """
    return ranks if read_strategy(config).offloads else machine.num_slots
