"""Place: the Slurm allocation that dsat runs in.

On each node, the supervisor runs in one long step, so trials wait neither for a queue nor for
imports.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsat.engines.machines.hosts import Host
from dsat.engines.places import local
from dsat.engines.places.base import Environment, inspect_machines
from dsat.errors import EngineError, UserInputError
from dsat.values import format as fmt

_log = logging.getLogger(__name__)
_ANSWER_LIMIT_S = 60.0
# Variables of the job that srun would read as options (`man srun`, input environment variables).
# dsat unsets them, so that only the options on srun's command line count.
_OPTIONS_OF_SRUN = """
    SLURM_CPU_BIND SLURM_CPUS_PER_GPU SLURM_CPUS_PER_TASK SLURM_DISTRIBUTION SLURM_EXCLUSIVE
    SLURM_GPU_BIND SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK
    SLURM_LABELIO SLURM_MEM_BIND SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE
    SLURM_MULTI_PROG SLURM_NNODES SLURM_NPROCS SLURM_NTASKS SLURM_NTASKS_PER_CORE
    SLURM_NTASKS_PER_GPU SLURM_NTASKS_PER_NODE SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_TRES
    SLURM_STDERRMODE SLURM_STDINMODE SLURM_STDOUTMODE SLURM_STEP_GRES SLURM_THREADS_PER_CORE
    SLURM_TRES_BIND SLURM_TRES_PER_TASK
""".split()


def detect(environment: Environment) -> bool:
    """Return whether dsat runs in an allocation that has other nodes than this machine."""
    allocation = Allocation.of(environment.variables)
    return allocation is not None and not allocation.is_this_machine


@contextlib.contextmanager
def acquire(environment: Environment, given: Mapping[str, Any]) -> Iterator[list[Host]]:
    """Yield all nodes of the allocation that dsat runs in."""
    allocation = Allocation.of(environment.variables)
    if allocation is None:
        raise UserInputError(
            "works only inside a Slurm allocation, but SLURM_JOB_ID or SLURM_JOB_NODELIST is "
            "not set",
            where="--engine slurm",
            hint="Start dsat in a job script (sbatch), or after salloc.",
        )
    if allocation.is_this_machine:
        with local.acquire(environment, given) as hosts:
            yield hosts
        return
    _log.info(
        "tuning on %d node%s of Slurm job %s, %s",
        allocation.count,
        "" if allocation.count == 1 else "s",
        allocation.job,
        allocation.nodes,
    )
    yield inspect_machines(allocation.find_nodes())


@dataclass(frozen=True)
class Allocation:
    """Nodes that `salloc`, `sbatch` or `srun` allocated to this process.

    Attributes:
        nodes: names in Slurm's short form, such as gpu[01-04].
        cpus: processors of each node in Slurm's short form, such as 32(x2).
        node: name of the node of this process; empty outside of the allocation, as after `salloc`.
    """

    job: str
    nodes: str
    count: int
    cpus: str
    node: str

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Allocation | None:
        """Return the allocation that environment variables describe; None without one.

        Raises:
            EngineError: srun started several processes of dsat, or the job is heterogeneous.
        """
        job, nodes = env.get("SLURM_JOB_ID"), env.get("SLURM_JOB_NODELIST")
        if not (job and nodes):
            return None
        if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            raise EngineError(
                f"srun has started dsat {env['SLURM_STEP_NUM_TASKS']} times. Start dsat once in "
                "the job, without srun: it starts what it needs on all nodes"
            )
        if int(env.get("SLURM_HET_SIZE", "1")) > 1:
            raise EngineError(
                f"Slurm job {job} is heterogeneous ({env['SLURM_HET_SIZE']} components), but "
                "trials on unequal nodes cannot be compared. Start dsat in a job of equal nodes, "
                "or use --engine local"
            )
        count = int(env.get("SLURM_JOB_NUM_NODES", "1"))
        cpus = env.get("SLURM_JOB_CPUS_PER_NODE", "1")
        return cls(job, nodes, count, cpus, env.get("SLURMD_NODENAME", ""))

    @property
    def is_this_machine(self) -> bool:
        """Return whether the allocation is only the node of this process."""
        return self.count == 1 and bool(self.node)

    def find_nodes(self) -> list[Host]:
        """Return the nodes; the node of this process, if it is one of them, comes first.

        Raises:
            EngineError: a command of Slurm is missing or fails, or the job is not running.
        """
        names = _ask("scontrol", "show", "hostnames", self.nodes).split()
        details = _ask("scontrol", "--oneliner", "show", "node", self.nodes)
        addresses = dict(re.findall(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", details, re.M))
        cpus = _expand_counts(self.cpus)
        if len(cpus) != len(names):
            raise EngineError(
                f"Slurm lists {fmt.count(len(names), 'node')} ({self.nodes}), but processors for "
                f"{len(cpus)} ({self.cpus})"
            )
        gres = self._gres()
        hosts = [
            Host(
                name=name,
                reach=self._prefix(name, n, gres),
                address=addresses.get(name, name),
                is_here=name == self.node,
            )
            for name, n in zip(names, cpus, strict=True)
        ]
        return sorted(hosts, key=lambda node: not node.is_here)

    def _gres(self) -> dict[str, str]:
        """Return the job's devices on each node, such as gpu:a100:2."""
        hint = "if that job is over, unset SLURM_JOB_ID or use --engine local"
        try:
            details = _ask("scontrol", "--oneliner", "show", "--details", "job", self.job)
        except EngineError as error:
            raise EngineError(f"Slurm job {self.job} (SLURM_JOB_ID): {error}; {hint}") from None
        state = re.search(rf"^JobId={self.job} .*?\bJobState=(\w+)", details, re.MULTILINE)
        if state is not None and state[1] != "RUNNING":
            raise EngineError(f"Slurm job {self.job} (SLURM_JOB_ID) is {state[1]}: {hint}")
        gres = {}
        for nodes, devices in re.findall(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", details):
            for name in _ask("scontrol", "show", "hostnames", nodes).split():
                gres[name] = re.sub(r"\([^)]*\)", "", devices)
        return gres

    def _prefix(self, node: str, cpus: int, gres: Mapping[str, str]) -> tuple[str, ...]:
        """Return the words that start a step with all of the job's resources on a node.

        The step shares resources with other steps. srun sees no variables that it would read as
        options. In a job with a total number of GPUs (`--gpus`), a step gets only the GPUs that it
        asks for.
        """
        return (
            "env",
            *(f"--unset={name}" for name in _OPTIONS_OF_SRUN),
            "srun",
            f"--jobid={self.job}",
            f"--nodelist={node}",
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={cpus}",
            "--mem=0",
            *([f"--gres={gres[node]}"] if gres.get(node) else []),
            "--overlap",
            "--export=ALL",
            "--input=all",
            "--job-name=dsat",
        )


def _ask(*command: str) -> str:
    """Run a command of Slurm and return its output; raise EngineError if it is missing or fails."""
    name = command[0]
    if shutil.which(name) is None:
        raise EngineError(
            f"Slurm's command {name} was not found. Start dsat where PATH has it, not in a "
            "container without it, or use --engine local"
        )
    try:
        return subprocess.run(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=_ANSWER_LIMIT_S,
        ).stdout
    except subprocess.TimeoutExpired:
        raise EngineError(f"{name} gave no answer within {_ANSWER_LIMIT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        lines = [re.sub(rf"^{name}: (error: )?", "", line) for line in error.stderr.splitlines()]
        message = "; ".join(filter(None, map(str.strip, lines)))
        raise EngineError(f"{name}: {message or f'exit status {error.returncode}'}") from None


def _expand_counts(cpus: str) -> list[int]:
    """Expand Slurm's short form of one number per node: "32(x2),16" means [32, 32, 16]."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", cpus):
        counts += [int(count)] * int(times or 1)
    return counts
