"""The hosts of the Slurm allocation that dsat runs in.

One long step on each node holds that node's supervisor: trials start warm, and without a queue.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from dsat.errors import EngineError

_ANSWER_LIMIT_S = 60.0


@dataclass(frozen=True)
class Node:
    """A node of an allocation.

    Attributes:
        name: Slurm's.
        address: by which Slurm's own daemons reach it.
        prefix: what goes before a command that is to run there, with our pipes, in a step.
        is_here: whether it is the one that this process runs on.
    """

    name: str
    address: str
    prefix: tuple[str, ...]
    is_here: bool


@dataclass(frozen=True)
class Allocation:
    """What `salloc`, `sbatch` or `srun` has made for this process.

    Attributes:
        job: its number.
        nodes: in Slurm's own short form, such as gpu[01-04].
        count: how many nodes there are.
        cpus: of each node, in Slurm's short form, such as 32(x2).
        node: that this process runs on; empty outside of the allocation, as after `salloc`.
    """

    job: str
    nodes: str
    count: int
    cpus: str
    node: str

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Allocation | None:
        """The allocation that environment variables tell of; None if there is none.

        Raises:
            EngineError: this is one of several processes in it that do the same, or its parts are
                not equal.
        """
        job, nodes = env.get("SLURM_JOB_ID"), env.get("SLURM_JOB_NODELIST")
        if not (job and nodes):
            return None
        if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            raise EngineError(
                f"srun has started dsat {env['SLURM_STEP_NUM_TASKS']} times: start it once in the "
                "job, without srun, and it starts what it needs on all nodes"
            )
        if int(env.get("SLURM_HET_SIZE", "1")) > 1:
            raise EngineError(
                f"Slurm job {job} is a heterogeneous one of {env['SLURM_HET_SIZE']} components, "
                "whose trials could not be compared: start dsat in a job of equal nodes, or with "
                "--engine local"
            )
        count = int(env.get("SLURM_JOB_NUM_NODES", "1"))
        cpus = env.get("SLURM_JOB_CPUS_PER_NODE", "1")
        return cls(job, nodes, count, cpus, env.get("SLURMD_NODENAME", ""))

    def find_nodes(self) -> list[Node]:
        """The nodes; the one that this process runs on comes first.

        Raises:
            EngineError: Slurm's commands are missing, or say nothing.
        """
        names = ask("scontrol", "show", "hostnames", self.nodes).split()
        described = ask("scontrol", "--oneliner", "show", "node", self.nodes)
        addresses = dict(re.findall(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", described, re.M))
        cpus = _expanded(self.cpus)
        if len(cpus) != len(names):
            raise EngineError(
                f"Slurm names {len(names)} nodes ({self.nodes}) and processors of {len(cpus)} "
                f"({self.cpus})"
            )
        found = [
            Node(name, addresses.get(name, name), self._prefix(name, count), name == self.node)
            for name, count in zip(names, cpus, strict=True)
        ]
        return sorted(found, key=lambda node: not node.is_here)

    def _prefix(self, node: str, cpus: int) -> tuple[str, ...]:
        """A step that has all that the job has on a node, beside other steps."""
        return (
            "srun",
            f"--jobid={self.job}",
            f"--nodelist={node}",
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={cpus}",
            "--mem=0",
            "--overlap",
            "--export=ALL",
            "--input=all",
            "--job-name=dsat",
        )


def ask(*command: str) -> str:
    """What one of Slurm's commands prints.

    Raises:
        EngineError: there is no such command, or it fails; the message is what it says, in one
            line.
    """
    name = command[0]
    if shutil.which(name) is None:
        raise EngineError(f"there is no {name} here, which is a command of Slurm's")
    try:
        found = subprocess.run(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=_ANSWER_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"{name} gave no answer within {_ANSWER_LIMIT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        lines = [re.sub(rf"^{name}: (error: )?", "", line) for line in error.stderr.splitlines()]
        said = "; ".join(filter(None, map(str.strip, lines)))
        raise EngineError(f"{name}: {said or f'exit status {error.returncode}'}") from None
    return found.stdout


def _expanded(cpus: str) -> list[int]:
    """The number for each node: 32(x2),16 is 32, 32, 16."""
    found = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", cpus):
        found += [int(count)] * int(times or 1)
    return found
