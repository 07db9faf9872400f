"""Options of launchers, mostly those that choose machines, devices and cores; and hostfiles.

Sources: deepspeed/launcher/runner.py (0.19.8, `parse_resource_filter`).
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dsat.errors import UserInputError
from dsat.values import format as fmt
from dsat.values.files import home

_log = logging.getLogger(__name__)
# Variables that choose devices of NVIDIA and AMD.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Options of launchers without a value, and with one. torchrun also accepts underscores.
SWITCHES = {
    "deepspeed": """
        --no_ssh --no_ssh_check --module --no_python --no_local_rank --force_multi
        --elastic_training --bind_cores_to_rank --save_pid --quiet -q
    """.split(),
    "torchrun": """
        --standalone -m --module --no-python --run-path --virtual-local-rank --use-env
    """.split(),
}
VALUED = {
    "deepspeed": """
        -H --hostfile -i --include -e --exclude --num_nodes --num_gpus --num_accelerators
        --master_port --master_addr --node_rank --launcher --launcher_args --enable_each_rank_log
        --autotuning --bind_core_list --ssh_port --venv_script --log_level --min_elastic_nodes
        --max_elastic_nodes
    """.split(),
    "torchrun": """
        --nnodes --nproc-per-node --node-rank --master-addr --master-port --local-addr
        --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --monitor-interval
        --start-method --event-log-handler --role --log-dir -r --redirects -t --tee
        --log-line-prefix-template --local-ranks-filter --duplicate-stdout-filters
        --duplicate-stderr-filters --logs-specs --numa-binding --signals-to-handle
        --shutdown-timeout
    """.split(),
}
_HOSTFILE = "/job/hostfile"  # DeepSpeed's default
_WHERE = "entrypoint"
_COUNT = re.compile("[0-9]{1,5}")
# A line of a hostfile. As in DeepSpeed's `_parse_hostfile`, the rest of the line is ignored. A name
# alone is accepted, too.
_MACHINE = re.compile(r"(\S+)(?:\s+slots=([0-9]{1,5})(?:\s.*)?)?")
_EXCLUDE = ("--exclude", "-e")
_NODES = "--num_nodes"
_PROCESSES = ("--nproc_per_node", "--nproc-per-node")


@dataclass(frozen=True)
class Launch:
    """Machines, devices and cores that a launcher's command chooses for its ranks.

    Attributes:
        hosts: machines of a hostfile, each with positions of its devices (empty for all); empty
            unless the hostfile has several machines.
        ssh_port: ssh port of these machines; None for the configured port.
        master_address: address where ranks of these machines meet; empty if not named.
        nodes: number of machines, if no hostfile names them.
        takes_all: whether a rank starts on every device.
        devices, not_devices: positions of the devices to use, or not to use; all if both are empty.
        binds_cores: whether each rank is bound to a share of the CPU cores.
        core_list: cores to share; empty for all cores of the machine.
        passes_local_rank: whether `--local_rank=N` is added to the arguments.
        other_args: arguments of other ranks, if they differ from the first rank's.
        batch_in_file: whether a file of the command sets the batch sizes; dsat writes a copy of
            this file with the best ones.
        config_is_word: whether trials replace the configuration that the script passes on, instead
            of the argument that names one. That argument may be no path (the script looks it up, or
            DeepSpeed decodes it), or the script may change the content of the file.
    """

    hosts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    ssh_port: int | None = None
    master_address: str = ""
    nodes: int = 1
    takes_all: bool = False
    devices: tuple[int, ...] = ()
    not_devices: tuple[int, ...] = ()
    binds_cores: bool = False
    core_list: tuple[int, ...] = ()
    passes_local_rank: bool = False
    other_args: tuple[tuple[str, ...], ...] = ()
    batch_in_file: bool = False
    config_is_word: bool = False


def read_options(options: Mapping[str, str]) -> tuple[int | None, Launch]:
    """Return the number of ranks (None if unknown) and the placement that DeepSpeed's options set.

    Raises UserInputError for an invalid number, and for an invalid choice of machines or devices.
    """
    launch = Launch(
        binds_cores="--bind_cores_to_rank" in options,
        core_list=parse_cores(options.get("--bind_core_list", "")),
        passes_local_rank="--no_local_rank" not in options,
    )
    path = options.get("--hostfile") or options.get("-H")
    hostfile = Path(path or _HOSTFILE)
    if path and not hostfile.is_file():
        _log.warning("there is no hostfile %s: as with DeepSpeed, ranks run on this machine", path)
    hosts = read(hostfile)
    if len(hosts) > 1:
        return None, replace(
            launch,
            hosts=tuple(choose_machines(hostfile, hosts, options).items()),
            ssh_port=read_count(options, "--ssh_port"),
            master_address=options.get("--master_addr", ""),
            takes_all=True,
        )
    nodes = read_count(options, _NODES) or 1
    used, unused = read_devices(options, "--include", "-i"), read_devices(options, *_EXCLUDE)
    slots = read_count(options, "--num_gpus", "--num_accelerators") or len(used) or None
    if slots is None and (host_slots := next(iter(hosts.values()), None)):
        slots = len(set(range(host_slots)).difference(unused)) or None
    launch = replace(launch, devices=used, not_devices=unused, nodes=nodes, takes_all=slots is None)
    return slots and nodes * slots, launch


def read_torchrun_options(options: Mapping[str, str]) -> tuple[int | None, Launch]:
    """Return the number of ranks (None if unknown) and the placement that torchrun's options set.

    Raises UserInputError if the number of machines is not fixed.
    """
    nnodes = options.get("--nnodes", "1")
    least, _, most = nnodes.partition(":")
    if not _COUNT.fullmatch(least) or most not in ("", least):
        raise UserInputError(
            f"--nnodes {nnodes}: all trials must run on the same number of machines",
            where=_WHERE,
            hint="Give one number.",
        )
    processes = {name: value for name in _PROCESSES if (value := options.get(name))}
    is_word = not all(map(_COUNT.fullmatch, processes.values()))  # auto, gpu, cpu
    nodes, slots = int(least), None if is_word else read_count(processes, *_PROCESSES)
    return slots and nodes * slots, Launch(nodes=nodes, takes_all=is_word)


def read_exported_variables(folder: Path) -> dict[str, str]:
    """Return variables that DeepSpeed's launcher exports to the machines of a hostfile.

    PYTHONPATH begins with `folder`, where the launcher starts.
    """
    path = [str(folder.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(path)}
    for parent in (home(), folder):
        file = parent / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        text = file.read_text("utf-8", "surrogateescape") if file.is_file() else ""
        variables |= {
            name.strip(): value.strip()
            for name, equals, value in (line.partition("=") for line in text.splitlines())
            if equals
        }
    return variables


def read(path: Path) -> dict[str, int | None]:
    """Return the numbers of slots in a hostfile (`NAME slots=N`), by machine; empty without a file.

    A number is None if missing. Raises UserInputError for an invalid line or a repeated machine.
    """
    slots_by_machine: dict[str, int | None] = {}
    if not path.is_file():
        return slots_by_machine
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        machine = line.partition("#")[0].strip()
        if not machine:
            continue
        match = _MACHINE.fullmatch(machine)
        if match is None:
            raise UserInputError(
                f"has an invalid line, {machine!r}",
                where=str(path),
                hint="Write, for example, NAME slots=8.",
            )
        name, slots = match.groups()
        if name in slots_by_machine:
            raise UserInputError(
                f"lists {name} twice", where=str(path), hint="Remove one of the lines."
            )
        slots_by_machine[name] = int(slots) if slots else None
    return slots_by_machine


def choose_machines(
    path: Path, machines: Mapping[str, int | None], options: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """Return the chosen machines with positions of devices; empty positions mean all devices.

    Raises UserInputError for a missing machine or device, for no machine, and for unequal machines.
    """
    positions = {name: tuple(range(n or 0)) for name, n in machines.items()}
    included = _filter(path, positions, options, "--include", "-i")
    excluded = _filter(path, positions, options, *_EXCLUDE)
    choice = included or positions
    # Keep the order of the hostfile, whose first machine has rank 0 and `--master_addr`.
    hosts = {name: choice[name] or slots for name, slots in positions.items() if name in choice}
    hosts = {
        name: tuple(slot for slot in slots if slot not in excluded.get(name, ()))
        for name, slots in hosts.items()
        if excluded.get(name) != ()
    }
    hosts = {name: slots for name, slots in hosts.items() if slots or machines[name] is None}
    nodes = read_count(options, _NODES)
    gpus = read_count(options, "--num_gpus", "--num_accelerators")
    if nodes is not None:
        if nodes > len(hosts):
            raise UserInputError(
                f"{_NODES} {nodes}: the hostfile ({path}) has only {len(hosts)} usable machines",
                where=_WHERE,
            )
        hosts = dict(itertools.islice(hosts.items(), nodes))
    if gpus is not None:
        hosts = {name: tuple(range(gpus)) for name in hosts}
    if not hosts:
        raise UserInputError(f"--include and --exclude leave no machine of {path}", where=_WHERE)
    first, *rest = hosts
    for name in rest:
        if len(hosts[name]) != len(hosts[first]):
            raise UserInputError(
                f"{_slots_text(hosts[first])} for {first} and {_slots_text(hosts[name])} for "
                f"{name} in {path}, but all machines need the same number",
                where=_WHERE,
                hint="Make the numbers equal with slots=N, --include or --num_gpus.",
            )
    return hosts


def read_devices(options: Mapping[str, str], *names: str) -> tuple[int, ...]:
    """Return the positions of this machine's devices that an option selects; empty if none.

    `names` are the spellings of the option, whose value is `NAME[:SLOT[,SLOT ..]]`. Raises
    UserInputError for any other form, or for several machines.
    """
    for name in names:
        value = options.get(name, "")
        if "@" in value:
            raise UserInputError(
                f"{name} {value} names {value.count('@') + 1} machines, but trials run on this one",
                where=_WHERE,
                hint="Use --num_gpus instead.",
            )
        if value and (positions := _positions(name, value)[1]):
            return positions
    return ()


def parse_cores(text: str) -> tuple[int, ...]:
    """Parse `--bind_core_list`: ascending numbers and ranges, such as `0,2-4`.

    This follows `parse_range_list` of deepspeed/utils/numa.py (0.19.8). Raises UserInputError for
    any other form.
    """
    cores: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part, re.ASCII)
        span = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not span or span[0] <= max(cores, default=-1):
            raise UserInputError(
                f"--bind_core_list {text}: must be ascending numbers and ranges",
                where=_WHERE,
                hint="Write, for example, 0,2-4.",
            )
        cores += span
    return tuple(cores)


def read_count(options: Mapping[str, str], *names: str) -> int | None:
    """Return the first positive number among the options `names`; None if there is none.

    Raises UserInputError if a value is not a whole number.
    """
    values = [(name, options[name]) for name in names if name in options]
    for name, text in values:
        if not _COUNT.fullmatch(text.removeprefix("-")):
            raise UserInputError(f"{name} {text}: expected a whole number", where=_WHERE)
    return next((int(text) for _, text in values if int(text) > 0), None)


def _positions(option: str, choice: str) -> tuple[str, tuple[int, ...]]:
    """Parse `NAME[:SLOT[,SLOT ..]]` into a machine and the positions of its devices."""
    name, colon, slots = choice.partition(":")
    numbers = [number.strip() for number in slots.split(",")] if colon else []
    if not all(map(_COUNT.fullmatch, numbers)):
        raise UserInputError(
            f"{option} {choice}: expected NAME:SLOT,SLOT, such as localhost:0,1", where=_WHERE
        )
    return name.strip(), tuple(sorted({int(number) for number in numbers}))


def _filter(
    path: Path, machines: Mapping[str, tuple[int, ...]], options: Mapping[str, str], *names: str
) -> dict[str, tuple[int, ...]]:
    """Parse `--include` or `--exclude`, `NAME[:SLOT,..][@NAME ..]`, into positions by machine."""
    positions: dict[str, tuple[int, ...]] = {}
    for option in names:
        for choice in filter(None, options.get(option, "").split("@")):
            name, slots = _positions(option, choice)
            if name not in machines:
                raise UserInputError(
                    f"{option} {choice}: {path} has no machine {name}", where=_WHERE
                )
            unknown = option in _EXCLUDE and not machines[name]
            absent = [
                slot for slot in slots if slot not in machines[name] and (machines[name] or unknown)
            ]
            if absent:
                raise UserInputError(
                    f"{option} {choice}: {path} lists no slot {absent[0]} for {name}", where=_WHERE
                )
            positions[name] = slots
    return positions


def _slots_text(slots: tuple[int, ...]) -> str:
    return fmt.count(len(slots), "slot") if slots else "all slots"
