"""Task, environment and command of a trial's processes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import wrapt

from dsat.engines.local import cores
from dsat.engines.local.hosts import Share
from dsat.engines.local.machine import Machine
from dsat.in_trial.loopback import ADDRESS, INTERFACES
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.rank import RankSpec
from dsat.inputs import ds_config
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment, length_in_units, trial_hparams
from dsat.values.text import words_without_secrets
from dsat.values.trial import Trial
from dsat.values.zero_strategy import NONE, of_config

COMMAND_FILE = "cmd.txt"
_PACKAGE = Path(__file__).resolve().parents[2]
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
        shares: what it has of each host, in the order of their ranks.
        trial: as the tuner decided it.
        config: its DeepSpeed configuration.
        folder: of the trial.
        meter: what is measured; None in a run that is not.
        ports: of the first host, three of them.
        seed: `trial_seed` of Determined scripts.
        cold: each rank is a fresh Python process.
        cpu_memory_bytes: if given, what a rank may use in a measured run on a CPU.
        simulation_socket: path of the socket that simulations are asked for on, if they are.
        linger_s: how long processes may go on after the trial's end; None for ever.
    """

    experiment: Experiment
    program: Entrypoint
    shares: tuple[Share, ...]
    trial: Trial
    config: Mapping[str, Any]
    folder: Path
    meter: MeterSpec | None
    ports: tuple[int, ...]
    seed: int
    cold: bool
    cpu_memory_bytes: int | None
    simulation_socket: Path | None
    linger_s: float | None

    def spec(self) -> RankSpec:
        """Return the specification that every rank reads."""
        hparams = trial_hparams(self.experiment.hparams, self.trial.overrides)
        # What else is there may hold credentials, which no file of ours should.
        config = {k: v for k, v in self.experiment.config.items() if k in _SHOWN_TO_SCRIPTS}
        length = _max_length(config)
        if self.meter is not None:
            hparams[ds_config.DSAT_MODE_KEY] = True
            length = length_in_units(self.meter.longest, config, self.trial.batch)
            config["searcher"] = {**dict(config.get("searcher") or {}), "name": "custom"}
        is_limited = self._machine.is_cpu and self.meter is not None
        return RankSpec(
            trial=self.trial.to_json(),
            program={**asdict(self.program), "env": {}},
            task={
                "trial_id": max(self.trial.id, 0),
                "slots": self._ranks,
                "hosts": self._addresses,
                "hparams": hparams,
                "experiment_config": config,
                "length": length,
                "seed": self.seed,
                "ports": list(self.ports[1:]),
                "devices": [] if self._machine.is_cpu else _devices(self.shares[0]),
            },
            meter=None if self.meter is None else self.meter.to_json(),
            simulation_socket=None
            if self.simulation_socket is None
            else str(self.simulation_socket),
            cpu_memory_bytes=self.cpu_memory_bytes if is_limited else None,
            threads=1 if self._machine.is_cpu else None,
        )

    def environment(self, rank: int) -> dict[str, str]:
        """All variables of a rank."""
        cross_rank, local_rank = divmod(rank, self._ranks_per_host)
        share, hosts = self.shares[cross_rank], str(len(self.shares))
        among_themselves = INTERFACES if self.shares[0].host.is_loopback or hosts == "1" else {}
        env = {**among_themselves, **os.environ, **self.experiment.env, **self.program.env}
        env.update(
            RANK=str(rank),
            LOCAL_RANK=str(local_rank),
            WORLD_SIZE=str(self._ranks),
            LOCAL_SIZE=str(self._ranks_per_host),
            LOCAL_WORLD_SIZE=str(self._ranks_per_host),
            CROSS_RANK=str(cross_rank),
            CROSS_SIZE=hosts,
            GROUP_RANK=str(cross_rank),
            GROUP_WORLD_SIZE=hosts,
            MASTER_ADDR=self._addresses[0],
            MASTER_PORT=str(self.ports[0]),
            USE_DEEPSPEED="1",
            DET_CHIEF_IP=self._addresses[0],
            DS_ACCELERATOR=self._machine.accelerator,
            PYTHONUNBUFFERED="1",
            DSAT_TRIAL_DIR=str(self.folder.resolve()),
        )
        # As in an activated environment: DeepSpeed compiles with the ninja that is found first, and
        # another version of ninja would compile everything anew.
        programs, path = os.path.dirname(self._interpreter), env.get("PATH", os.defpath)
        if programs not in path.split(os.pathsep):
            env["PATH"] = os.pathsep.join([programs, path])
        env.update(share.host.machine.variables_of(share.slots or (0,)))
        ranks = self._ranks_per_host
        env.update(settings_of_ranks(self._machine, self.program, self.config, ranks, env))
        if self.cold:
            found = [env.get("PYTHONPATH"), str(self._packages())]
            env["PYTHONPATH"] = os.pathsep.join(filter(None, found))
        return env

    def requests(self, cwd: Path) -> dict[int, dict[str, Any]]:
        """Return the requests to the supervisors by host, to be run in the folder `cwd`."""
        return {
            share.index: self._request(cross_rank, share, cwd)
            for cross_rank, share in enumerate(self.shares)
        }

    def _request(self, cross_rank: int, share: Share, cwd: Path) -> dict[str, Any]:
        first = cross_rank * self._ranks_per_host
        return {
            "op": "launch",
            "trial": self.trial.id,
            "folder": str(self.folder.resolve()),
            "cwd": str(cwd.resolve()),
            "port": self.ports[0],
            "command": self._cold_command if self.cold else None,
            "ranks": [
                {"env": self.environment(first + local), "cores": self._cores(share, local)}
                for local in range(share.ranks)
            ],
            "logs": log_files(cross_rank),
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
            line = " ".join(["env", *words, shlex.join(self._cold_command)])
            host = self.shares[rank // self._ranks_per_host].host.name
            ranks.append(f"# on {host}\n{line}" if len(self.shares) > 1 else line)
        words = words_without_secrets(self.program.command())
        lines = [f"# {shlex.join(words)}", f"cd {shlex.quote(str(cwd.resolve()))}"]
        return "\n".join([*lines, " &\n".join(ranks)]) + "\n"

    def _cores(self, share: Share, local_rank: int) -> list[int]:
        """The processor cores that a rank is bound to; none if it may use all."""
        machine = share.host.machine
        if machine.is_cpu:
            # As taskset gives them to a command that is run by hand: to its ranks together.
            return [int(machine.devices[slot]) for slot in share.slots]
        if not (self.program.binds_cores and share.slots):
            return []
        # Beside other trials, each slot has its cores.
        ranks = self._ranks_per_host
        sharers = _sharers(machine, self.config, ranks)
        place = local_rank if sharers == ranks else share.slots[local_rank]
        return cores.share_of(_shared_cores(machine, self.program), place, sharers)

    @property
    def _machine(self) -> Machine:
        """Any of the hosts', for what they have in common."""
        return self.shares[0].host.machine

    @property
    def _ranks_per_host(self) -> int:
        return self.shares[0].ranks

    @property
    def _ranks(self) -> int:
        return self._ranks_per_host * len(self.shares)

    @property
    def _addresses(self) -> list[str]:
        """Addresses of the hosts; loopback if there is one."""
        if len(self.shares) == 1:
            return [ADDRESS]
        return [share.host.address for share in self.shares]

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
        if not self.program.interpreter:
            return _PACKAGE.parent
        return self._linked_packages()

    def _linked_packages(self) -> Path:
        """The same of dsat's packages alone."""
        together = self.folder.resolve() / "packages"
        together.mkdir(exist_ok=True)
        needed = [_PACKAGE]
        if self.program.lacks_wrapt:
            needed.append(Path(wrapt.__file__).parent)
        for path in needed:
            link = together / path.name
            if not link.is_symlink():
                link.symlink_to(path)
        return together


def log_files(cross_rank: int) -> list[str]:
    """Return the log files of a host's ranks: two hosts cannot append to the same file."""
    part = f"-{cross_rank}" if cross_rank else ""
    return [f"stdout{part}.log", f"stderr{part}.log"]


def _devices(share: Share) -> list[str]:
    return [share.host.machine.devices[slot] for slot in share.slots or (0,)]


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
        ranks: how many there are on a host.
        given: variables that there are already; what the user has set is left alone, but on a CPU,
            whose slots are cores.
    """
    settings = {}
    if machine.expandable_segments and not allocator_is_set(given):
        settings.update(ALLOCATOR_SETTINGS)
    if machine.is_cpu:
        settings["OMP_NUM_THREADS"] = "1"
    elif program.binds_cores:  # the launcher sets it, whatever it was
        own = _shared_cores(machine, program)
        share = cores.share_of(own, 0, _sharers(machine, config, ranks))
        settings["OMP_NUM_THREADS"] = str(len(share))
    elif "OMP_NUM_THREADS" not in given:
        sharers = _sharers(machine, config, ranks)
        as_torchrun = not program.passes_local_rank
        if as_torchrun and ranks > 1 and not offloads(config):
            settings["OMP_NUM_THREADS"] = "1"
        elif sharers > 1:
            settings["OMP_NUM_THREADS"] = str(max(1, machine.threads // sharers))
    return settings


def allocator_is_set(env: Mapping[str, str]) -> bool:
    """Return whether the user has chosen settings of torch's allocator."""
    return bool(_ALLOCATOR_VARIABLES & env.keys())


def binding_options(
    machine: Machine, program: Entrypoint, config: Mapping[str, Any], ranks: int
) -> list[str]:
    """Options of DeepSpeed's launcher that bind ranks to as many cores as they had in a trial."""
    sharers, own = _sharers(machine, config, ranks), sorted(program.core_list)
    if sharers > ranks:
        among = _shared_cores(machine, program)
        shares = [cores.share_of(among, rank, sharers) for rank in range(ranks)]
        own = sorted(core for share in shares for core in share)
    listed = ["--bind_core_list", ",".join(map(str, own))] if own else []
    return ["--bind_cores_to_rank", *listed]


def _shared_cores(machine: Machine, program: Entrypoint) -> Sequence[int]:
    """The cores that the user's launcher shares out among ranks."""
    return program.core_list or machine.cores


def _sharers(machine: Machine, config: Mapping[str, Any], ranks: int) -> int:
    """Ranks among which the cores are divided, those of trials side by side included.

    The optimizer of a trial that offloads runs on the cores, and the trial has them alone.
    """
    return ranks if offloads(config) else machine.num_slots


def offloads(config: Mapping[str, Any]) -> bool:
    """Return whether a DeepSpeed configuration offloads anything."""
    strategy = of_config(config)
    return (strategy.offload_optimizer, strategy.offload_param) != (NONE, NONE)


def working_folder(experiment: Experiment, folder: Path) -> Path:
    """Return the model folder, or one that shows it together with the includes."""
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
    """Return the length of a full run: `searcher.max_length`, a number or `{unit: number}`."""
    searcher = config.get("searcher")
    length = searcher.get("max_length", 1) if isinstance(searcher, Mapping) else 1
    if isinstance(length, Mapping):
        length = next(iter(length.values()), 1)
    return int(length)
