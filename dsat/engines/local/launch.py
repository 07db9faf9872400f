"""What one trial's processes are started with: their task, their environment, their command."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import wrapt

from dsat.engines.local import cores
from dsat.engines.local.machine import Machine
from dsat.in_trial.loopback import INTERFACES
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.rank import RankSpec
from dsat.inputs import ds_config
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment, length_in_units, trial_hparams
from dsat.values.text import words_without_secrets
from dsat.values.trial import Trial
from dsat.values.zero_strategy import NONE, of_config

COMMAND_FILE = "cmd.txt"
# Otherwise memory is lost between blocks, and runs out before what is allocated says so. The name
# is understood by all versions of torch; the newer one goes before it where both are set.
ALLOCATOR_SETTINGS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
_ALLOCATOR_VARIABLES = {*ALLOCATOR_SETTINGS, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
_SHOWN_TO_SCRIPTS = frozenset(
    """
    checkpoint_policy data debug description entrypoint labels max_restarts min_checkpoint_period
    min_validation_period name optimizations perform_initial_validation profiling project
    records_per_epoch reproducibility resources scheduling_unit searcher workspace
    """.split()
)


@dataclass(frozen=True)
class Launch:
    """One start of a trial's ranks.

    Attributes:
        experiment: what is run.
        program: its entrypoint, with the trial's own configuration.
        machine: the slots.
        trial: as the tuner decided it.
        config: its DeepSpeed configuration.
        folder: of the trial.
        meter: what is measured; None in a run that is not.
        slots: numbers of the slots; none if the script is only run for simulations.
        ports: on loopback, three of them.
        seed: `trial_seed` of Determined scripts.
        cold: each rank is a fresh Python process.
        cpu_memory_bytes: if given, what a rank may use in a measured run on a CPU.
        capture: the run is only to tell which configuration the script passes to DeepSpeed.
        simulation_socket: path of the socket that simulations are asked for on, if they are.
        linger_s: how long processes may go on after the trial's end; None for ever.
    """

    experiment: Experiment
    program: Entrypoint
    machine: Machine
    trial: Trial
    config: Mapping[str, Any]
    folder: Path
    meter: MeterSpec | None
    slots: tuple[int, ...]
    ports: tuple[int, ...]
    seed: int
    cold: bool
    cpu_memory_bytes: int | None
    capture: bool
    simulation_socket: Path | None
    linger_s: float | None

    def spec(self) -> RankSpec:
        """What every rank needs to know."""
        hparams = trial_hparams(self.experiment.hparams, self.trial.overrides)
        # What else is there may hold credentials, which no file of ours should.
        config = {k: v for k, v in self.experiment.config.items() if k in _SHOWN_TO_SCRIPTS}
        length = _max_length(config)
        if self.meter is not None:
            hparams[ds_config.DSAT_MODE_KEY] = True
            length = length_in_units(self.meter.longest, config, self.trial.batch)
            config["searcher"] = {**dict(config.get("searcher") or {}), "name": "custom"}
        is_limited = self.machine.is_cpu and self.meter is not None
        return RankSpec(
            trial=self.trial.to_json(),
            program={**asdict(self.program), "env": {}},
            task={
                "trial_id": max(self.trial.id, 0),
                "slots": self._ranks,
                "hparams": hparams,
                "experiment_config": config,
                "length": length,
                "seed": self.seed,
                "ports": list(self.ports[1:]),
                "devices": [] if self.machine.is_cpu else self._devices,
            },
            meter=None if self.meter is None else self.meter.to_json(),
            capture=self.capture,
            simulation_socket=None
            if self.simulation_socket is None
            else str(self.simulation_socket),
            cpu_memory_bytes=self.cpu_memory_bytes if is_limited else None,
            threads=1 if self.machine.is_cpu else None,
        )

    def environment(self, rank: int) -> dict[str, str]:
        """All variables of a rank."""
        size = str(self._ranks)
        env = {**INTERFACES, **os.environ, **self.experiment.env, **self.program.env}
        env.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=size,
            LOCAL_SIZE=size,
            LOCAL_WORLD_SIZE=size,
            CROSS_RANK="0",
            CROSS_SIZE="1",
            GROUP_RANK="0",
            GROUP_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.ports[0]),
            USE_DEEPSPEED="1",
            DET_CHIEF_IP="127.0.0.1",
            DS_ACCELERATOR=self.machine.accelerator,
            PYTHONUNBUFFERED="1",
            DSAT_TRIAL_DIR=str(self.folder.resolve()),
        )
        # As in an activated environment: DeepSpeed compiles with the ninja that is found first, and
        # another version of ninja would compile everything anew.
        programs, path = os.path.dirname(self._interpreter), env.get("PATH", os.defpath)
        if programs not in path.split(os.pathsep):
            env["PATH"] = os.pathsep.join([programs, path])
        for variable in self.machine.visible_devices:
            env[variable] = ",".join(self._devices)
        env.update(settings_of_ranks(self.machine, self.program, self.config, self._ranks, env))
        if self.cold:
            found = [env.get("PYTHONPATH"), str(self._packages())]
            env["PYTHONPATH"] = os.pathsep.join(filter(None, found))
        return env

    def request(self, cwd: Path) -> dict[str, Any]:
        """What the supervisor is asked for, to be run in the folder `cwd`."""
        return {
            "op": "launch",
            "trial": self.trial.id,
            "folder": str(self.folder.resolve()),
            "cwd": str(cwd.resolve()),
            "port": self.ports[0],
            "command": self._cold_command if self.cold else None,
            "ranks": [
                {"env": self.environment(rank), "cores": self._cores(rank)}
                for rank in range(self._ranks)
            ],
            "linger_s": self.linger_s,
        }

    def command_text(self, cwd: Path) -> str:
        """The program, and a command for each rank that a person can paste into a shell.

        Variables of the user's experiment may be credentials: they are named, not written down.
        """
        users_own = {*self.experiment.env, *self.program.env}
        ranks = []
        for rank in range(self._ranks):
            env: Mapping[str, str] = self.environment(rank)
            changed = {k: v for k, v in env.items() if os.environ.get(k) != v}
            words = [
                f'{key}="${key}"' if key in users_own else f"{key}={shlex.quote(value)}"
                for key, value in sorted(changed.items())
            ]
            ranks.append(" ".join(["env", *words, shlex.join(self._cold_command)]))
        words = words_without_secrets(self.program.command())
        lines = [f"# {shlex.join(words)}", f"cd {shlex.quote(str(cwd.resolve()))}"]
        return "\n".join([*lines, " &\n".join(ranks)]) + "\n"

    def _cores(self, rank: int) -> list[int]:
        """The processor cores that a rank is bound to; none if it may use all."""
        if self.machine.is_cpu:
            # As taskset gives them to a command that is run by hand: to its ranks together.
            return [int(self.machine.devices[slot]) for slot in self.slots]
        if not (self.program.binds_cores and self.slots):
            return []
        # Beside other trials, each slot has its cores.
        sharers = _sharers(self.machine, self.config, self._ranks)
        return cores.share_of(rank if sharers == self._ranks else self.slots[rank], sharers)

    @property
    def _ranks(self) -> int:
        return len(self.slots) or 1

    @property
    def _devices(self) -> list[str]:
        return [self.machine.devices[slot] for slot in self.slots or (0,)]

    @property
    def _cold_command(self) -> list[str]:
        options = self.program.python_options
        module = ["-m", "dsat.in_trial.rank", str(self.folder.resolve())]
        return [self._interpreter, *options, *module]

    @property
    def _interpreter(self) -> str:
        return self.program.interpreter or sys.executable

    def _packages(self) -> Path:
        """A folder with what ranks import of dsat's environment.

        An interpreter of another environment must not see what else is installed beside dsat.
        """
        package = Path(__file__).resolve().parents[2]
        if not self.program.interpreter:
            return package.parent
        together = self.folder.resolve() / "packages"
        together.mkdir(exist_ok=True)
        needed = [package]
        if self.program.lacks_wrapt:
            needed.append(Path(wrapt.__file__).parent)
        for path in needed:
            link = together / path.name
            if not link.is_symlink():
                link.symlink_to(path)
        return together


def settings_of_ranks(
    machine: Machine,
    program: Entrypoint,
    config: Mapping[str, Any],
    ranks: int,
    given: Mapping[str, str],
) -> dict[str, str]:
    """Variables that memory and speed depend on, the same in trials and in training.

    Args:
        machine: where the ranks run.
        program: what they run, with its launcher's habits.
        config: their DeepSpeed configuration.
        ranks: how many there are.
        given: variables that there are already; what the user has set is left alone, but on a CPU,
            whose slots are cores.
    """
    settings = {}
    if machine.expandable_segments and not _ALLOCATOR_VARIABLES & given.keys():
        settings.update(ALLOCATOR_SETTINGS)
    if machine.is_cpu:
        settings["OMP_NUM_THREADS"] = "1"
    elif program.binds_cores:  # the launcher sets it, whatever it was
        share = cores.share_of(0, _sharers(machine, config, ranks))
        settings["OMP_NUM_THREADS"] = str(len(share))
    elif "OMP_NUM_THREADS" not in given:
        sharers = _sharers(machine, config, ranks)
        as_torchrun = program.one_thread or not program.passes_local_rank
        if as_torchrun and ranks > 1 and not offloads(config):
            settings["OMP_NUM_THREADS"] = "1"
        elif sharers > 1:
            settings["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // sharers))
    return settings


def binding_options(machine: Machine, config: Mapping[str, Any], ranks: int) -> list[str]:
    """Options of DeepSpeed's launcher that bind ranks to as many cores as they had in a trial."""
    options = ["--bind_cores_to_rank"]
    sharers = _sharers(machine, config, ranks)
    if sharers > ranks:
        own = [str(core) for rank in range(ranks) for core in cores.share_of(rank, sharers)]
        options += ["--bind_core_list", ",".join(own)]
    return options


def _sharers(machine: Machine, config: Mapping[str, Any], ranks: int) -> int:
    """Ranks among which the cores are divided, those of trials side by side included.

    The optimizer of a trial that offloads runs on the cores, and the trial has them alone.
    """
    return ranks if offloads(config) else machine.num_slots


def offloads(config: Mapping[str, Any]) -> bool:
    """Whether a DeepSpeed configuration keeps anything in the host's memory or on a disk."""
    strategy = of_config(config)
    return (strategy.offload_optimizer, strategy.offload_param) != (NONE, NONE)


def working_folder(experiment: Experiment, folder: Path) -> Path:
    """Where trials run: the model folder, or one that shows it together with the includes."""
    if not experiment.includes:
        return experiment.model_dir
    together = folder / "context"
    together.mkdir(exist_ok=True)
    for path in [*experiment.model_dir.iterdir(), *experiment.includes]:
        link = together / path.name
        if not link.is_symlink():
            link.symlink_to(path.resolve())
    return together


def _max_length(config: Mapping[str, Any]) -> int:
    """Of a full-length run: `searcher.max_length`, a number or `{unit: number}`."""
    searcher = config.get("searcher")
    length = searcher.get("max_length", 1) if isinstance(searcher, Mapping) else 1
    if isinstance(length, Mapping):
        length = next(iter(length.values()), 1)
    return int(length)
