"""How long a two-rank, six-step trial of a tiny model takes from its launch to its outcome.

    python -m benchmarks.trial_start [--runs 7]

Beside dsat's warm and cold trials: the same script as plain processes with environment variables,
under torchrun and under the deepspeed launcher, each until its last process has ended. Where Slurm
or Ray is installed, also warm trials with a rank on each of two nodes, all daemons on this machine.
The kinds take turns, so that a slow spell of the machine meets all of them. DeepSpeed's operators
are compiled before anything is counted. One more figure is what a run pays once: the warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.common import run_trial
from dsat.app import hosts
from dsat.engines.local.engine import LocalEngine
from dsat.engines.local.hosts import Host
from dsat.engines.local.launch import LocalOptions
from dsat.engines.local.machine import find_machine
from dsat.inputs import entrypoint, experiment
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind, TrialOptions
from testing import ray_cluster, slurm

PROGRAM = Path(__file__).parent / "programs" / "six_steps.py"
BIN = Path(sys.executable).parent
RANKS = 2
BATCH = BatchTriple(4 * RANKS, 4, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each kind")
    runs = parser.parse_args().runs
    machine = find_machine()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as opened:
        folder = Path(scratch)
        began = time.perf_counter()
        warm = DsatTrials([Host(machine)], folder / "warm", cold=False)
        warm_up_s = time.perf_counter() - began
        cold = DsatTrials([Host(machine)], folder / "cold", cold=True)
        over_hosts = {
            name: DsatTrials(opened.enter_context(hosts), folder / name.split()[-1], cold=False)
            for name, hosts in clusters(folder).items()
        }
        kinds: dict[str, Callable[[], None]] = {
            "dsat, warm": warm.run,
            **{name: trials.run for name, trials in over_hosts.items()},
            "dsat --cold": cold.run,
            "plain python": plain_python,
            "torchrun": torchrun,
            "deepspeed launcher": deepspeed_launcher,
        }
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(runs + 1):
            for name, run in kinds.items():
                began = time.perf_counter()
                run()
                if number:  # the first round compiles operators and fills caches
                    times[name].append(time.perf_counter() - began)
        for trials in (warm, cold, *over_hosts.values()):
            trials.close()
    print(f"{machine.describe()}; Python {platform.python_version()}; medians of {runs} runs")
    print(f"warm-up of a run, once: {warm_up_s:.2f} s\n")
    print(f"{'':20} {'median s':>9} {'min':>7} {'max':>7} {'x warm':>7}")
    base = statistics.median(times["dsat, warm"])
    for name, values in times.items():
        median = statistics.median(values)
        row = f"{name:20} {median:9.2f} {min(values):7.2f} {max(values):7.2f}"
        print(f"{row} {median / base:7.1f}")


def clusters(folder: Path) -> dict[str, AbstractContextManager[Sequence[Host]]]:
    """What is installed, by the name of its line."""
    found: dict[str, AbstractContextManager[Sequence[Host]]] = {}
    if not slurm.missing():
        found["dsat, Slurm"] = slurm_nodes(folder / "slurm")
    if ray_cluster.is_installed():
        found["dsat, Ray"] = ray_nodes()
    return found


@contextlib.contextmanager
def slurm_nodes(folder: Path) -> Iterator[Sequence[Host]]:
    """Two nodes with a processor core each."""
    folder.mkdir()
    with slurm.running(folder, 2) as cluster, cluster.allocation(2) as variables:
        os.environ.update(variables)
        with hosts.acquired("slurm") as nodes:
            yield nodes


@contextlib.contextmanager
def ray_nodes() -> Iterator[Sequence[Host]]:
    """Two nodes with a processor core each."""
    with (
        ray_cluster.running(2) as cluster,
        hosts.acquired("ray", given={"ray_address": cluster.address}) as nodes,
    ):
        yield nodes


class DsatTrials:
    """A local engine that is given the same trial again and again."""

    def __init__(self, hosts: Sequence[Host], folder: Path, *, cold: bool) -> None:
        model_dir = folder / "model"
        model_dir.mkdir(parents=True)
        shutil.copy(PROGRAM, model_dir)
        own = PROGRAM.with_suffix(".json")
        shutil.copy(own, model_dir)
        config = {
            "entrypoint": f"python3 {PROGRAM.name}",
            "hyperparameters": {"deepspeed_config": json.loads(own.read_text())},
        }
        (folder / "experiment.json").write_text(json.dumps(config))
        user = experiment.read(folder / "experiment.json", model_dir)
        self.engine = LocalEngine(
            user,
            entrypoint.parse(user.entrypoint, model_dir),
            hosts,
            folder,
            LocalOptions(TrialOptions(timeout_s=600.0, end_step=6, max_steps=4), cold=cold),
            slots_per_trial=RANKS,
        )
        self.count = 0

    def run(self) -> None:
        self.count += 1
        name = f"trial{self.count}"
        trial = Trial(self.count, TrialKind.SEARCH, name, 1, BATCH, BATCH.config())
        outcome = run_trial(self.engine, trial)
        assert outcome.kind is OutcomeKind.OK, outcome

    def close(self) -> None:
        self.engine.close()


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])  # the same ninja for all
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": path, **more}


def plain_python() -> None:
    port = str(20000 + os.getpid() % 10000)
    processes = []
    for rank in range(RANKS):
        env = environment(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(RANKS),
            LOCAL_SIZE=str(RANKS),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        processes.append(quiet([sys.executable, str(PROGRAM)], env))
    finish(*processes)


def torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    finish(quiet([*command, f"--nproc-per-node={RANKS}", str(PROGRAM)], environment()))


def deepspeed_launcher() -> None:
    command = [str(BIN / "deepspeed"), "--num_gpus", str(RANKS), str(PROGRAM)]
    finish(quiet(command, environment(LOCAL_SIZE=str(RANKS))))


def quiet(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def finish(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        if process.wait() != 0:
            raise SystemExit(f"{process.args!r} ended with status {process.returncode}")


if __name__ == "__main__":
    main()
