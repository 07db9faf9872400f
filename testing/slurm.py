"""Real daemons of Slurm with several nodes on this machine, started without a service manager."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsat.engines.ports import free_ports
from testing.local import wait_until

PROGRAMS = ("slurmctld", "slurmd", "slurmstepd", "srun", "sbatch", "salloc", "scancel", "scontrol")
# A partition whose jobs preempt the jobs of the other partition, which are requeued.
URGENT = "urgent"
_PATIENCE_S = 60.0
_KILL_WAIT_S = 20
_CONFIG = """
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=15
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait={kill_wait_s}
InactiveLimit=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
"""
# Any device file can stand for a GPU; nobody opens it.
_GPUS = ("/dev/null", "/dev/zero")


@dataclass(frozen=True)
class Slurm:
    """A cluster whose daemons run.

    Attributes:
        folder: its configuration, state and logs.
        nodes: names of the nodes; each has two devices that stand for GPUs.
        env: variables with which programs find the cluster.
    """

    folder: Path
    nodes: Sequence[str]
    env: Mapping[str, str]

    def ask(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """Return the output of one of Slurm's commands, run with `env` or the cluster's
        variables."""
        return subprocess.run(
            command,
            env=self.env if env is None else env,
            check=True,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_PATIENCE_S,
        ).stdout

    def submit(self, command: str, log: Path, *options: str) -> str:
        """Submit a job script with one command; return the job's number."""
        script = log.with_suffix(".sh")
        script.write_text(f"#!/bin/sh\nexec {command}\n")
        words = ["--parsable", f"--output={log}", *options, str(script)]
        return self.ask("sbatch", *words).strip()

    def state(self, job: str) -> str:
        """Return a job's state: PENDING, RUNNING, COMPLETED, CANCELLED, FAILED, ..."""
        shown = self.ask("scontrol", "--oneliner", "show", "job", job)
        [state] = [word[9:] for word in shown.split() if word.startswith("JobState=")]
        return state

    def wait_for(self, job: str, timeout_s: float) -> str:
        """Wait until a job has ended and all nodes are idle; return the job's state."""
        going_on = ("PENDING", "RUNNING", "COMPLETING")
        wait_until(lambda: self.state(job) not in going_on, f"the end of job {job}", timeout_s)
        wait_until(lambda: self._idle() == len(self.nodes), "idle nodes", timeout_s)
        return self.state(job)

    @contextlib.contextmanager
    def allocation(self, nodes: int, *options: str) -> Iterator[Mapping[str, str]]:
        """Allocate nodes; yield the variables of a shell that `salloc` starts."""
        script = "env -0; echo; exec cat >/dev/null"
        with subprocess.Popen(
            ["salloc", "--quiet", f"--nodes={nodes}", *options, "sh", "-c", script],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as shell:
            assert shell.stdin is not None and shell.stdout is not None
            told = b""
            while not told.endswith(b"\0\n"):
                told += os.read(shell.stdout.fileno(), 65536)
                assert shell.poll() is None, "salloc has ended"
            variables = told.decode().removesuffix("\0\n").split("\0")
            try:
                yield dict(each.partition("=")[::2] for each in variables)
            finally:
                shell.stdin.close()
                shell.wait(_PATIENCE_S)

    def _idle(self) -> int:
        told = self.ask("sinfo", "--noheader", "--Node", "--partition=main", "--format=%t")
        return told.split().count("idle")


def missing() -> list[str]:
    """Return the programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


@contextlib.contextmanager
def running(folder: Path, nodes: int, *, cpus: int = 1) -> Iterator[Slurm]:
    """Start a cluster of `nodes` nodes with `cpus` CPU cores each; stop its jobs and daemons on
    exit."""
    names = [f"n{number}" for number in range(1, nodes + 1)]
    controller_port, *ports = free_ports(nodes + 1)
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True)
    given = {"folder": folder, "controller_port": controller_port, "kill_wait_s": _KILL_WAIT_S}
    lines = [_CONFIG.format(**given, user=user.stdout.strip())]
    for name, port in zip(names, ports, strict=True):
        where = f"NodeHostname=localhost NodeAddr=127.0.0.1 Port={port}"
        lines.append(f"NodeName={name} {where} CPUs={cpus} Gres=gpu:{len(_GPUS)} State=UNKNOWN")
        (folder / f"spool-{name}").mkdir()
    for partition, tier in (("main", 1), (URGENT, 2)):
        more = f"PriorityTier={tier} Default={'YES' if tier == 1 else 'NO'} State=UP"
        lines.append(f"PartitionName={partition} Nodes={','.join(names)} {more}\n")
    config = folder / "slurm.conf"
    config.write_text("\n".join(lines))
    gpus = [f"NodeName={name} Name=gpu File={path}\n" for name in names for path in _GPUS]
    (folder / "gres.conf").write_text("".join(gpus))
    (folder / "state").mkdir()
    # The tests may run in a job of another cluster.
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env |= {"SLURM_CONF": str(config), "PATH": _path()}
    cluster = Slurm(folder, names, env)
    cores = sorted(os.sched_getaffinity(0))
    stepd = shutil.which("slurmstepd", path=_path())
    assert stepd is not None
    with contextlib.ExitStack() as daemons:
        daemons.enter_context(_daemon(["slurmctld", "-D"], env, folder / "slurmctld.out"))
        for number, name in enumerate(names):
            # The jobs of a node are bound to its cores, as on a separate machine.
            its = ",".join(str(cores[(number + n) % len(cores)]) for n in range(cpus))
            command = ["taskset", "--cpu-list", its, "slurmd", "-D", "-N", name, "-d", stepd]
            daemons.enter_context(_daemon(command, env, folder / f"{name}.out"))
        wait_until(lambda: cluster._idle() == nodes, "idle nodes", _PATIENCE_S)
        try:
            yield cluster
        finally:
            cluster.ask("scancel", "--state=RUNNING")
            wait_until(lambda: cluster._idle() == nodes, "the end of all jobs", _PATIENCE_S)


@contextlib.contextmanager
def _daemon(command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[None]:
    with open(log, "ab") as file:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _path() -> str:
    """Return the search path for the daemons, which includes this environment's Python."""
    given = os.environ.get("PATH", os.defpath)
    return os.pathsep.join([os.path.dirname(sys.executable), given, "/usr/sbin", "/usr/local/sbin"])
