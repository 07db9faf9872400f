"""Engines and trials of real processes, and a look at what is left of them."""

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
# For what takes seconds: a loaded machine has taken minutes.
PATIENCE_S = 600.0
SMALL_BUCKETS = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}


def cpu_machine(slots: int) -> Machine:
    """A machine of so many CPU slots; cores are shared if it has fewer in truth."""
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    return Machine(
        accelerator="cpu",
        device_name="test",
        devices=tuple(str(core) for core in itertools.islice(cores, slots)),
        visible_devices=(),
        memory_bytes=8 * 2**30,
    )


def hosts_here(count: int, *, imported: bool = False) -> list[Host]:
    """So many hosts, all of them this machine, with processor cores of their own if it has them.

    Args:
        imported: as of `engine_of`.
    """
    machine = cpu_machine(count)
    # What a step of a cluster is: a command that runs another.
    prefix = warm_host.prefix() if imported else ("env",)
    return [
        Host(replace(machine, devices=(device,)), name=f"host{number}", prefix=prefix)
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
    """An engine for one of the programs beside this file, with a time-out of ten minutes.

    Args:
        program: a name, or the path of another folder.
        cold: ranks are fresh processes.
        command: each trial runs this, which starts `slots_per_trial` ranks of the program.
        imported: its supervisor is forked from a process that has imported torch and DeepSpeed.
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
        hosts or [Host(cpu_machine(slots), prefix=warm_host.prefix() if imported else ())],
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
    """An engine for a user's command, of which a run has shown what its ranks are.

    Args:
        place: folder of the command, with `ds_config.json`.
        needs_command: why ranks cannot be started by themselves.
        seen: of their program: `script`, `args` and `env`.
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
    """An engine and its folder; gives every trial an id of its own."""

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
        """Launches a trial and waits for it, and for it alone."""
        self.engine.launch(trial)
        [(trial_id, outcome)] = self.engine.poll(PATIENCE_S + 30)
        assert trial_id == trial.id
        return outcome

    def path(self, trial: Trial) -> Path:
        return self.folder / "trials" / trial.name

    def read(self, trial: Trial, name: str) -> str:
        return (self.path(trial) / name).read_text(encoding="utf-8")

    def log(self, trial: Trial) -> str:
        """For the message of a failed assertion."""
        return self.read(trial, "stdout.log") + self.read(trial, "stderr.log")

    def supervisor(self, host: int = 0) -> psutil.Process:
        """Asks it, for what was started may only have started it elsewhere."""
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
    """A request to a supervisor to run a command as the only rank of a trial."""
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
        "linger_s": None,
    }


def environment_of_a_rank(**variables: str) -> dict[str, str]:
    """This process's environment for a script that is started by hand, as a single rank."""
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
    """The first true value of `holds()`."""
    deadline = time.monotonic() + timeout_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
    return value


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def processes_of(folder: Path) -> list[str]:
    """Living processes that a run in `folder` started: by environment, arguments or open logs.

    A forked rank has its parent's environment and arguments on record, but its output goes to its
    trial's logs.
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
    """DeepSpeed's buffers, which its CPU backend never unlinks."""
    return {path.name for path in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")}


def buffers_of(folder: Path) -> list[str]:
    """Buffers of a run's trials that are still there: their names end with the trials' ports."""
    words = [w for path in folder.glob("trials/*/cmd.txt") for w in path.read_text().split()]
    ports = {word[len("MASTER_PORT=") :] for word in words if word.startswith("MASTER_PORT=")}
    return [name for name in shared_memory() if name.split("_")[-2] in ports]


def assert_nothing_is_left(run_dir: Path) -> None:
    """Check that a run's processes end, and that their buffers go with them."""
    wait_until(lambda: not processes_of(run_dir), "the end of all processes", 20)
    wait_until(lambda: not buffers_of(run_dir), "the removal of their buffers", 20)


def warnings_of(outcome: Outcome) -> tuple[str, ...]:
    """Return a real trial's warnings without those about the test machine."""
    return tuple(warning for warning in outcome.warnings if warning != HOST_ACCIDENTS)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
