"""A real Ray cluster in a child process, with several nodes on this machine.

    python -m testing.ray_cluster CORE ...

Starts one node for each CPU core named. Prints the cluster's address and the pid of each node as
JSON lines. Each line of standard input, `CORE GPUS`, adds a node; its end stops the cluster.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

_MEMORY_BYTES = 80 * 2**20  # of a node's object store, which stays empty


@dataclass
class RayCluster:
    """A running cluster.

    Attributes:
        address: the address for drivers.
        env: variables with which a program finds the cluster by itself.
        nodes: the raylet process of each node; the head node is first.
    """

    address: str
    dashboard: str
    process: subprocess.Popen[str]
    nodes: list[psutil.Process] = field(default_factory=list)

    @property
    def env(self) -> Mapping[str, str]:
        return {**os.environ, "RAY_ADDRESS": self.address}

    def add(self, core: int, gpus: int = 0) -> psutil.Process:
        """Add a node, which may claim to have GPUs."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{core} {gpus}\n")
        self.process.stdin.flush()
        self.nodes.append(psutil.Process(_told(self.process)["pid"]))
        return self.nodes[-1]


def is_installed() -> bool:
    return importlib.util.find_spec("ray") is not None


@contextlib.contextmanager
def running(nodes: int) -> Iterator[RayCluster]:
    """Start a cluster of `nodes` nodes; stop all of its processes on exit."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = [str(cores[number % len(cores)]) for number in range(nodes)]
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, *chosen],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        start_new_session=True,
    )
    try:
        head = _told(process)
        cluster = RayCluster(head["address"], head["dashboard"], process)
        cluster.nodes += [psutil.Process(_told(process)["pid"]) for _ in chosen]
        yield cluster
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        below = psutil.Process(process.pid).children(recursive=True)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            for left in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the cluster has ended"
    found: dict[str, Any] = json.loads(line)
    return found


def _serve(cores: list[int]) -> None:
    # Standard output is for answers only, so Ray's output goes to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for number, core in enumerate(cores):
        node = _add(cluster, core)
        if number == 0:
            _tell(answers, address=cluster.address, dashboard=cluster.webui_url or "")
        _tell(answers, pid=node)
    for line in sys.stdin:
        _tell(answers, pid=_add(cluster, *map(int, line.split())))
    cluster.shutdown()


def _add(cluster: Any, core: int, gpus: int = 0) -> int:
    """Add a node whose processes are bound to one core, as on a machine with a single core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        node = cluster.add_node(num_cpus=1, num_gpus=gpus, object_store_memory=_MEMORY_BYTES)
    finally:
        os.sched_setaffinity(0, before)
    [raylet] = node.all_processes["raylet"]
    return int(raylet.process.pid)


def _tell(answers: IO[str], **what: Any) -> None:
    answers.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    _serve([int(core) for core in sys.argv[1:]])
