"""Engines and trials with real processes, and checks that nothing remains of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from dsat.command import entrypoint, experiment
from dsat.engines.engine import LocalEngine
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import Machine
from dsat.engines.ports import free_ports
from dsat.engines.start import LocalOptions
from dsat.in_trial.measurement import HOST_ACCIDENTS
from dsat.values.outcome import Outcome
from dsat.values.trial import BatchTriple, Trial, TrialKind, TrialOptions
from testing import warm_host

PROGRAMS = Path(__file__).parent / "programs"
# Patience for what usually takes seconds; a loaded machine needs minutes.
PATIENCE_S = 600.0
SMALL_BUCKETS = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}


def cpu_machine(slots: int) -> Machine:
    """Make a machine of `slots` CPU slots; slots share cores if there are too few."""
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    return Machine(
        accelerator="cpu",
        device_name="test",
        devices=tuple(str(core) for core in itertools.islice(cores, slots)),
        visible_devices=(),
        memory_bytes=8 * 2**30,
    )


def hosts_here(count: int, *, imported: bool = False) -> list[Host]:
    """Make `count` hosts that are all this machine, each with its own CPU core if there are enough.

    Args:
        imported: as in `engine_of`.
    """
    machine = cpu_machine(count)
    # Like a step of a cluster: a command that runs another command.
    prefix = warm_host.prefix() if imported else ("env",)
    return [
        Host(replace(machine, devices=(device,)), name=f"host{number}", reach=prefix)
        for number, device in enumerate(machine.devices)
    ]


def engine_of(
    program: str,
    folder: Path,
    *,
    slots: int = 1,
    slots_per_trial: int = 1,
    entry: str | None = None,
    ds_config: Mapping[str, Any] | None = None,
    includes: Sequence[Path] = (),
    cold: bool = False,
    command: Sequence[str] = (),
    hosts: Sequence[Host] = (),
    imported: bool = False,
    **options: Any,
) -> LocalEngine:
    """Make an engine for one of `testing/programs`, with a time-out of ten minutes.

    Args:
        program: a name, or the path of another folder.
        cold: start ranks as fresh processes.
        command: each trial runs this, which starts `slots_per_trial` ranks of the program.
        imported: a process that has imported torch and DeepSpeed forks the supervisor.
    """
    place = PROGRAMS / program
    user = experiment.read(place / "deepspeed.yaml", place, includes)
    if entry is not None:
        user = replace(user, entrypoint=entry)
    if ds_config is not None:
        user = replace(user, ds_config=ds_config, hparams={"deepspeed_config": ds_config})
    runs = entrypoint.parse(user.entrypoint, user.model_dir)
    if command:
        runs = replace(
            runs,
            slots=slots_per_trial,
            needs_command="a test says so",
            started_by=tuple(command),
            started_in=str(place.resolve()),
        )
    return LocalEngine(
        user,
        runs,
        hosts or [Host(cpu_machine(slots), reach=warm_host.prefix() if imported else ())],
        folder,
        LocalOptions(
            TrialOptions(**{"timeout_s": PATIENCE_S, "end_step": 5, "max_steps": 5, **options}),
            cold=cold,
        ),
        slots_per_trial=slots_per_trial,
    )


def engine_of_command(
    place: Path,
    folder: Path,
    command: Sequence[str],
    *,
    slots: int = 1,
    needs_command: str = "",
    **seen: Any,
) -> LocalEngine:
    """Make an engine for a user's command, as if its first run had recorded its ranks.

    Args:
        place: the folder of the command, with `ds_config.json`.
        needs_command: the reason why ranks can only be started by the command.
        seen: what the ranks run: `script`, `args` and `env`.
    """
    program = entrypoint.Entrypoint(
        slots=slots,
        needs_command=needs_command,
        started_by=tuple(command),
        started_in=str(place),
        **{"script": "", **seen},
    )
    return LocalEngine(
        experiment.make_experiment(command, "own", place, place / "ds_config.json"),
        program,
        [Host(cpu_machine(slots))],
        folder,
        LocalOptions(TrialOptions(timeout_s=PATIENCE_S, end_step=5, max_steps=5), cold=True),
        slots_per_trial=slots,
    )


@dataclass
class Bench:
    """An engine and its folder; numbers its trials."""

    engine: LocalEngine
    folder: Path
    slots_per_trial: int = 1

    def __post_init__(self) -> None:
        self._ids = itertools.count()

    def trial(
        self,
        behaviour: str = "runs",
        *,
        micro_batch: int = 2,
        gas: int = 1,
        stage: int = 1,
        kind: TrialKind = TrialKind.SEARCH,
        flops_per_sample: float | None = None,
        zero: Mapping[str, Any] | None = None,
    ) -> Trial:
        trial_id = next(self._ids)
        batch = BatchTriple(micro_batch * gas * self.slots_per_trial, micro_batch, gas)
        behaves = {} if behaviour == "runs" else {"behaviour": behaviour}
        return Trial(
            id=trial_id,
            kind=kind,
            name=f"z{stage}_mbs{micro_batch}_gas{gas}_{trial_id:04x}",
            stage=stage,
            batch=batch,
            overrides={
                **batch.config(),
                "zero_optimization": {"stage": stage, **(zero or {})},
                **behaves,
            },
            flops_per_sample=flops_per_sample,
        )

    def run(self, trial: Trial) -> Outcome:
        """Launch a trial, wait for its end and return its outcome; no other trial may run."""
        self.engine.launch(trial)
        [(trial_id, outcome)] = self.engine.poll(PATIENCE_S + 30)
        assert trial_id == trial.id
        return outcome

    def path(self, trial: Trial) -> Path:
        return self.folder / "trials" / trial.name

    def read(self, trial: Trial, name: str) -> str:
        return (self.path(trial) / name).read_text(encoding="utf-8")

    def log(self, trial: Trial) -> str:
        """Return a trial's output, for the message of a failed assertion."""
        return self.read(trial, "stdout.log") + self.read(trial, "stderr.log")

    def supervisor(self, host: int = 0) -> psutil.Process:
        """Return a host's supervisor; it reports its own pid, as the engine may know only its
        starter's."""
        supervisors, look = (
            self.engine._supervisors,
            {"op": "look", "files": [], "folder": "/"},
        )
        answers = supervisors._ask(dict.fromkeys(supervisors._clients, look), PATIENCE_S)
        return psutil.Process(answers[host]["pid"])


@contextlib.contextmanager
def bench_of(
    program: str, folder: Path, *, slots: int | None = None, slots_per_trial: int = 1, **more: Any
) -> Iterator[Bench]:
    slots = slots_per_trial if slots is None else slots
    engine = engine_of(program, folder, slots=slots, slots_per_trial=slots_per_trial, **more)
    try:
        yield Bench(engine, folder, slots_per_trial)
    finally:
        engine.close()


def launch_request(folder: Path, *command: str) -> dict[str, Any]:
    """Return a supervisor request that launches a command as the only rank of a trial."""
    return {
        "op": "launch",
        "trial": 0,
        "folder": str(folder),
        "cwd": str(folder),
        "port": 1,
        "fork": False,
        "starts_ranks": False,
        "ranks": [{"env": dict(os.environ), "cores": [], "command": command}],
        "logs": ["out", "err"],
        "is_full_run": True,
        "swap": [],
    }


def environment_of_a_rank(**variables: str) -> dict[str, str]:
    """Return this environment with the variables that make a script a single rank."""
    programs = os.path.dirname(sys.executable)
    return {
        **os.environ,
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "DS_ACCELERATOR": "cpu",
        **variables,
    }


def wait_until(holds: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Wait until `holds()` returns a true value, and return the value."""
    deadline = time.monotonic() + timeout_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
    return value


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def processes_of(folder: Path) -> list[str]:
    """Return the living processes that a run in `folder` started.

    Their environment, their arguments or their open logs name the folder. A forked rank shows the
    environment and arguments of its parent, but writes into its trial's logs.
    """
    text = str(folder.resolve())
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, FileNotFoundError, PermissionError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = process.environ().get("DSAT_TRIAL_DIR", "")
            outputs = [os.readlink(f"/proc/{process.pid}/fd/{n}") for n in (1, 2)]
            if any(text in part for part in [*process.cmdline(), environment, *outputs]):
                found.append(f"{process.pid}: {process.cmdline()} {outputs}")
    return found


def shared_memory() -> set[str]:
    """Return the names of DeepSpeed's buffers in `/dev/shm`, which its CPU backend never
    unlinks."""
    return {path.name for path in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")}


def buffers_of(folder: Path) -> list[str]:
    """Return the buffers that remain of a run's trials; a buffer's name contains the trial's
    port."""
    words = [w for path in folder.glob("trials/*/cmd.txt") for w in path.read_text().split()]
    ports = {word[len("MASTER_PORT=") :] for word in words if word.startswith("MASTER_PORT=")}
    return [name for name in shared_memory() if name.split("_")[-2] in ports]


def assert_nothing_is_left(run_dir: Path) -> None:
    """Check that a run's processes end, and that their buffers are removed."""
    wait_until(lambda: not processes_of(run_dir), "the end of all processes", 20)
    wait_until(lambda: not buffers_of(run_dir), "the removal of their buffers", 20)


def warnings_of(outcome: Outcome) -> tuple[str, ...]:
    """Return a trial's warnings, except the one about a busy test machine."""
    return tuple(warning for warning in outcome.warnings if warning != HOST_ACCIDENTS)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def ended(bench: Bench, *trials: Trial) -> list[Outcome]:
    """Return the outcomes of trials that run concurrently."""
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(trials):
        outcomes.update(bench.engine.poll(PATIENCE_S))
    return [outcomes[trial.id] for trial in trials]


def launched(bench: Bench, *behaviours: str) -> list[Trial]:
    trials = [bench.trial(behaviour) for behaviour in behaviours]
    for trial in trials:
        bench.engine.launch(trial)
    return trials
