"""Duration of a two-rank, six-step trial of a tiny model, from its launch to its outcome.

    python -m benchmarks.trial_start [--runs 7]

dsat's warm and cold trials are compared with the same script as plain processes, under torchrun and
under the deepspeed launcher, each until its last process has ended. If Slurm or Ray is installed,
there are also warm trials with a rank on each of two nodes, with all daemons on this machine. The
kinds take turns, so that slow spells of the machine affect all alike. DeepSpeed's operators are
compiled before anything is timed. The warm-up, which a run needs only once, is shown separately.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks import common
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import find_machine
from dsat.prepare import hosts
from dsat.values.trial import BatchTriple, Trial, TrialKind, TrialOptions
from testing import ray_cluster, slurm

PROGRAM = Path(__file__).parent / "programs" / "six_steps.py"
RANKS = 2
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    f"--nproc-per-node={RANKS}",
)
DEEPSPEED = (str(common.BIN / "deepspeed"), "--num_gpus", str(RANKS))
BATCH = BatchTriple(4 * RANKS, 4, 1)
_QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each kind")
    runs = parser.parse_args().runs
    machine = find_machine()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as opened:
        folder = Path(scratch)
        began = time.perf_counter()
        kinds = {"dsat, warm": opened.enter_context(dsat_trials([Host(machine)], folder / "warm"))}
        warm_up_s = time.perf_counter() - began
        for name, nodes in clusters(folder):
            over_hosts = dsat_trials(opened.enter_context(nodes), folder / name.split()[-1])
            kinds[name] = opened.enter_context(over_hosts)
        cold = dsat_trials([Host(machine)], folder / "cold", cold=True)
        kinds |= {
            "dsat --cold": opened.enter_context(cold),
            "plain python": plain_python,
            "torchrun": functools.partial(launched, TORCHRUN),
            "deepspeed launcher": functools.partial(launched, DEEPSPEED),
        }
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(runs + 1):
            for name, run in kinds.items():
                began = time.perf_counter()
                run()
                if number:  # the first round compiles operators and fills caches
                    times[name].append(time.perf_counter() - began)
    print(f"{machine.describe()}; Python {platform.python_version()}; medians of {runs} runs")
    print(f"warm-up of a run, once: {warm_up_s:.2f} s\n")
    print(f"{'':20} {'median s':>9} {'min':>7} {'max':>7} {'x warm':>7}")
    base = statistics.median(times["dsat, warm"])
    for name, values in times.items():
        median = statistics.median(values)
        row = f"{name:20} {median:9.2f} {min(values):7.2f} {max(values):7.2f}"
        print(f"{row} {median / base:7.1f}")


def clusters(folder: Path) -> Iterator[tuple[str, AbstractContextManager[Sequence[Host]]]]:
    """Yield the installed clusters, by the name of their line in the output."""
    if not slurm.missing():
        yield "dsat, Slurm", slurm_nodes(folder / "slurm")
    if ray_cluster.is_installed():
        yield "dsat, Ray", ray_nodes()


@contextlib.contextmanager
def slurm_nodes(folder: Path) -> Iterator[Sequence[Host]]:
    """Yield two nodes with one CPU core each."""
    folder.mkdir()
    with slurm.running(folder, 2) as cluster, cluster.allocation(2) as variables:
        os.environ.update(variables)
        with hosts.acquire_hosts("slurm") as nodes:
            yield nodes


@contextlib.contextmanager
def ray_nodes() -> Iterator[Sequence[Host]]:
    """Yield two nodes with one CPU core each."""
    with (
        ray_cluster.running(2) as cluster,
        hosts.acquire_hosts("ray", given={"ray_address": cluster.address}) as nodes,
    ):
        yield nodes


@contextlib.contextmanager
def dsat_trials(
    hosts: Sequence[Host], folder: Path, *, cold: bool = False
) -> Iterator[Callable[[], None]]:
    """Yield a function that runs the same trial each time."""
    config = json.loads(PROGRAM.with_suffix(".json").read_text())
    options = TrialOptions(timeout_s=600.0, end_step=6, max_steps=4)
    command, count = ["python3", str(PROGRAM)], itertools.count(1)
    engine = common.engine_of(command, config, folder, hosts, options, slots=RANKS, cold=cold)

    def run() -> None:
        number = next(count)
        trial = Trial(number, TrialKind.SEARCH, f"trial{number}", 1, BATCH, BATCH.config())
        outcome = common.run_trial(engine, trial)
        assert outcome.ok, outcome

    with contextlib.closing(engine):
        yield run


def environment(**more: str) -> dict[str, str]:
    return common.environment(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", **more)


def plain_python() -> None:
    """Start each rank as a plain process, without a launcher."""
    port = str(20000 + os.getpid() % 10000)
    processes = []
    for rank in map(str, range(RANKS)):
        sizes = {"WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS)}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = environment(RANK=rank, LOCAL_RANK=rank, **sizes, **address)
        processes.append(subprocess.Popen([sys.executable, str(PROGRAM)], env=env, **_QUIET))
    for process in processes:
        if process.wait():
            raise SystemExit(f"{process.args!r} ended with status {process.returncode}")


def launched(launcher: Sequence[str]) -> None:
    """Start the ranks with a launcher."""
    env = environment(LOCAL_SIZE=str(RANKS))
    subprocess.run([*launcher, str(PROGRAM)], env=env, check=True, **_QUIET)


if __name__ == "__main__":
    main()
