"""The program that the ranks of a command run, from the recorded starts of its Python processes.

All functions are pure; `dsat.in_trial.start_record` records the starts.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsat.command import entrypoint as entrypoints
from dsat.command.entrypoint import Entrypoint, split_interpreter
from dsat.command.placement import VISIBLE, Launch
from dsat.errors import UserInputError
from dsat.values.codec import Recorded

_SPAWNED = "--multiprocessing-fork"
# Flags that DeepSpeed's launcher and `torch.distributed.launch` put before each rank's arguments.
_LOCAL_RANK_FLAGS = _LOCAL_RANK, _DASHED_LOCAL_RANK = "--local_rank", "--local-rank"
ONE_TRAINING = (
    "Give a command that starts one training, for example: dsat tune torchrun train.py ..."
)
ONE_NODE = "Start all ranks on this machine, for example: dsat tune torchrun train.py ..."
# Variables that launchers set for each rank, or that do not affect the training.
_OF_A_START = frozenset(
    """
    RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK
    ROLE_NAME ROLE_WORLD_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT NODE_RANK
    PWD OLDPWD SHLVL _ MAKEFLAGS MAKEOVERRIDES MAKELEVEL MAKE_TERMOUT MAKE_TERMERR MFLAGS
    HYDI_CONTROL_FD NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_ASYNC_ERROR_HANDLING
    PYTORCH_NVML_BASED_CUDA_CHECK GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK
    """.split()
)
_PREFIXES_OF_A_START = tuple(
    "TORCHELASTIC_ OMPI_ OPAL_ ORTE_ PMIX_ PMI_ PRTE_ MPI_ MPIR_ HYDRA_ SLURM_ "
    "SLURMD_ SRUN_ IPATH_ PALS_ FLUX_ MV2_ MPISPAWN_ JSM_ ALPS_".split()
)

_THREADS = ("OMP_NUM_THREADS", "1")  # launchers set it unless the user did
# Variables by which launchers pass the number of all ranks, and of the ranks on a node.
_IN_ALL = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_ON_THIS_NODE = tuple(
    "LOCAL_WORLD_SIZE LOCAL_SIZE OMPI_COMM_WORLD_LOCAL_SIZE MPI_LOCALNRANKS".split()
)


@dataclass(frozen=True)
class RankStart(Recorded):
    """Start of a process that called `deepspeed.initialize`.

    Attributes:
        rank, size: the process's rank and the number of ranks; 0 and 1 without a launcher.
        forked: whether a Python process forked it, without starting an interpreter.
        prefix: `sys.prefix` of its Python environment.
        command: the interpreter with its options, the program and its arguments.
        argv: `sys.argv` of the process, or of the process that spawned it.
        env: environment variables at the start.
        env_later: variables that choose devices and that the process set after its start.
        env_above: variables that choose devices, with their values in the processes above it.
        cores: CPU cores that the process could use at the start.
        config: configuration that it passed to `deepspeed.initialize`; None if not recorded.
        config_problem: why `config` cannot be written as JSON; empty if it can.
    """

    rank: int
    size: int
    forked: bool
    executable: str
    prefix: str
    version: tuple[int, ...]
    command: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(repr=False)  # may hold credentials
    env_later: Mapping[str, str] = field(default_factory=dict)
    env_above: Mapping[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    config: Mapping[str, Any] | None = None
    config_problem: str = ""

    @property
    def local_size_of_launcher(self) -> int:
        """Number of ranks that the launcher started on this machine; all ranks if unknown."""
        launcher_set_size = str(self.size) in map(
            self.env.get, _IN_ALL
        )  # else the script set the size
        if _why_created_by_python(self) or not launcher_set_size:
            return self.size
        local_sizes = [self.env[name] for name in _ON_THIS_NODE if self.env.get(name, "").isdigit()]
        return min(self.size, int(local_sizes[0])) if local_sizes else self.size


def check_one_training(ranks: Sequence[RankStart]) -> None:
    """Raise UserInputError unless the processes are exactly the ranks of one training."""
    numbers = [rank.rank for rank in ranks]
    size = ranks[0].size
    if len(set(numbers)) < len(numbers) or any(rank.size != size for rank in ranks):
        starts = max(numbers.count(number) for number in numbers)
        raise UserInputError(
            f"starts {max(starts, 2)} trainings, but dsat tunes only one",
            where="command",
            hint=ONE_TRAINING,
        )
    if len(ranks) < size:
        raise UserInputError(
            f"runs on several nodes: only {len(ranks)} of its {size} ranks started here",
            where="command",
            hint=ONE_NODE,
        )


def recognise_program(
    ranks: Sequence[RankStart],
    command: Sequence[str],
    env: Mapping[str, str],
    cores: Collection[int],
) -> Entrypoint:
    """Return the program that a command's ranks run; raise UserInputError for several trainings."""
    check_one_training(ranks)
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    first = ranks[0]
    needs_command = _why_only_command(first)
    (program, flag), *others = (_program_of(rank, is_made=bool(needs_command)) for rank in ranks)
    own_env, *rest = (_difference(rank.env, env) for rank in ranks)
    if needs_command:
        pass
    elif flag == _DASHED_LOCAL_RANK:
        needs_command = f"the launcher passes {flag} to each rank"
    elif any(other != (program, flag) for other in others):
        needs_command = "they have different arguments"
    elif any(own_env[name] != env[name] for env in rest for name in own_env.keys() & env.keys()):
        needs_command = "they have different environment variables"
    bound = _bound_cores(ranks, cores) if flag == _LOCAL_RANK else ()
    is_mine = (first.prefix, first.version) == (sys.prefix, tuple(sys.version_info[:2]))
    return replace(
        program,
        launch=Launch(
            binds_cores=bool(bound),
            core_list=bound,
            passes_local_rank=flag == _LOCAL_RANK,
            other_args=tuple(sorted({other.args for other, _ in others} - {program.args})),
        ),
        env={
            **{n: v for n, v in own_env.items() if all(env.get(n) == v for env in rest)},
            **_chosen_devices(ranks, env),
        },
        interpreter="" if is_mine else first.executable,
        slots=first.size,
        started_by=tuple(command),
        needs_command=needs_command,
        takes_hf_flags=entrypoints.parses_hf_arguments(program, Path(first.cwd)),
    )


def _program_of(rank: RankStart, *, is_made: bool) -> tuple[Entrypoint, str]:
    """Return what a rank runs, and the flag by which its launcher passes the local rank (or "").

    `is_made` says whether only the command can start the rank.
    """
    program = (
        _make_seen_program(rank) if is_made else entrypoints.parse_python_words(rank.command[1:])
    )
    flag, _, number = program.args[0].partition("=") if program.args else ("", "", "")
    if flag not in _LOCAL_RANK_FLAGS or number != rank.env.get("LOCAL_RANK", "0"):
        return program, ""
    return replace(program, args=program.args[1:]), flag


def _bound_cores(ranks: Sequence[RankStart], cores: Collection[int]) -> tuple[int, ...]:
    """Return the cores to which DeepSpeed's launcher bound the ranks, in the order of ranks.

    The result is empty if ranks share cores, or if a single rank may use all `cores`: then the
    launcher bound none.
    """
    bound = [core for rank in ranks for core in rank.cores]
    is_shared = len(set(bound)) < len(bound)
    return () if is_shared or (len(ranks) == 1 and set(bound) == set(cores)) else tuple(bound)


def _why_only_command(first: RankStart) -> str:
    """Return why only the command can start a rank; empty if dsat can start it directly."""
    if reason := _why_created_by_python(first):
        return reason
    _, program = split_interpreter(first.command[1:])
    if program[:1] in ([], ["-c"], ["-"]):
        return "the program is not in a file (-c, or standard input)"
    script = [] if program[0] == "-m" else [program[0]]
    for path in [first.cwd, first.executable, *script]:
        if not (Path(first.cwd) / path).exists():
            return f"{path} no longer exists when the command has ended"
    return ""


def _why_created_by_python(rank: RankStart) -> str:
    is_made = rank.forked or _SPAWNED in rank.command
    return "another Python process starts them (multiprocessing)" if is_made else ""


def _make_seen_program(first: RankStart) -> Entrypoint:
    """Return what is known about the program of a process that only the command can start."""
    _, program = split_interpreter(first.command[1:])
    if program[:1] == ["-m"]:
        return Entrypoint(module=program[1], args=tuple(program[2:]))
    script = first.argv[0] if first.argv else ""
    is_there = bool(script) and (Path(first.cwd) / script).is_file()
    return Entrypoint(script=script if is_there else "", args=first.argv[1:])


def _difference(has: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a command sets, except variables of launchers and devices.

    Exported functions of bash (`BASH_FUNC_module%%`) are left out: no command can assign them.
    """
    return {
        name: value
        for name, value in has.items()
        if name.isidentifier()
        and env.get(name) != value
        and ((name, value) != _THREADS or name in env)
        and name not in (*_OF_A_START, *VISIBLE)
        and not name.startswith(_PREFIXES_OF_A_START)
    }


def _chosen_devices(ranks: Sequence[RankStart], env: Mapping[str, str]) -> dict[str, str]:
    """Return variables by which the command itself chooses devices.

    Variables that a launcher set do not count: they differ between ranks, or (with DeepSpeed)
    number the devices from 0. If the script itself sets them, it overrides the devices of every
    trial. Then the result has the devices of all ranks, and trials run one at a time.
    """
    numbered = ",".join(map(str, range(len(ranks)))) if "CROSS_SIZE" in ranks[0].env else None
    devices_by_name = {}
    for name in VISIBLE:
        value, *rest = {rank.env.get(name) for rank in ranks}
        is_launchers = value == numbered != ranks[0].env_above.get(name)
        if set_later := [rank.env_later[name] for rank in ranks if rank.env_later.get(name)]:
            devices = dict.fromkeys(",".join(set_later).split(","))
            devices_by_name[name] = ",".join(list(devices)[: len(ranks)])
        elif value and not rest and value != env.get(name) and not is_launchers:
            devices_by_name[name] = value
    return devices_by_name
