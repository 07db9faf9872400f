"""Task, environment and command of a trial's processes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import wrapt

from dsat.engines.local.hosts import Share
from dsat.engines.local.machine import Machine
from dsat.engines.local.rank_settings import cores_of, settings_of_ranks
from dsat.engines.local.running import FULL_RUN_ID, Start
from dsat.in_trial.loopback import ADDRESS, INTERFACES, is_loopback
from dsat.in_trial.rank_files import RankSpec
from dsat.inputs import accelerate_env, ds_config, switches
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment, length_in_units, trial_hparams
from dsat.values.text import assignment, words_without_secrets
from dsat.values.trial import TrialOptions

COMMAND_FILE = "cmd.txt"
# How long processes may go on after the trial's end.
LINGER_S = 20.0
_PACKAGE = Path(__file__).resolve().parents[2]
_SHOWN_TO_SCRIPTS = frozenset(
    """
    checkpoint_policy data debug description entrypoint labels max_restarts min_checkpoint_period
    min_validation_period name optimizations perform_initial_validation profiling project
    records_per_epoch reproducibility resources scheduling_unit searcher workspace
    """.split()
)


@dataclass(frozen=True)
class LocalOptions:
    """Options of running and measuring trials.

    Attributes:
        trial: what holds for the trials of any engine.
        cold: start each rank as a fresh Python process.
        seed: `trial_seed` of Determined scripts.
        imported: modules that forked ranks find imported; by default, what trials need.
    """

    trial: TrialOptions
    cold: bool = False
    seed: int = 42
    imported: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """One start of a trial's ranks.

    Attributes:
        experiment: what is run.
        program: its entrypoint, with the trial's own configuration.
        start: the trial, its folder and its measurement.
        shares: its slots of each host, in the order of their ranks.
        config: its DeepSpeed configuration.
        ports: of the first host, three of them.
        options: of all trials.
        is_forked: whether ranks are forked from the supervisor.
    """

    experiment: Experiment
    program: Entrypoint
    start: Start
    shares: tuple[Share, ...]
    config: Mapping[str, Any]
    ports: tuple[int, ...]
    options: LocalOptions
    is_forked: bool

    def spec(self) -> RankSpec:
        """Return the specification that every rank reads."""
        trial, meter, socket = self.start.trial, self.start.meter, self.start.simulation_socket
        hparams = trial_hparams(self.experiment.hparams, trial.overrides)
        # What else is there may hold credentials, which no file of ours should.
        config = {k: v for k, v in self.experiment.config.items() if k in _SHOWN_TO_SCRIPTS}
        length = _max_length(config)
        if meter is not None:
            hparams[ds_config.DSAT_MODE_KEY] = True
            length = length_in_units(meter.longest, config, trial.batch)
        if meter is not None or socket is not None:  # no training in full length
            config["searcher"] = {**dict(config.get("searcher") or {}), "name": "custom"}
        is_cpu, memory_bytes = self._machine.is_cpu, self.options.trial.slot_memory_bytes
        devices = [self._machine.devices[slot] for slot in self.shares[0].slots or (0,)]
        return RankSpec(
            trial=trial.to_json(),
            program={**asdict(self.program), "env": {}},
            task={
                "trial_id": max(trial.id, 0),
                "slots": self._ranks,
                "hosts": self._addresses,
                "hparams": hparams,
                "experiment_config": config,
                "length": length,
                "seed": self.options.seed,
                "ports": list(self.ports[1:]),
                "devices": [] if is_cpu else devices,
            },
            meter=None if meter is None else meter.to_json(),
            simulation_socket=None if socket is None else str(socket),
            cpu_memory_bytes=memory_bytes if is_cpu and meter is not None else None,
            threads=1 if is_cpu else None,
        )

    def environment(self, rank: int) -> dict[str, str]:
        """Return all variables of a rank."""
        cross_rank, local_rank = divmod(rank, self._ranks_per_host)
        share, hosts = self.shares[cross_rank], str(len(self.shares))
        among_themselves = INTERFACES if is_loopback(self._addresses[0]) else {}
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
            DSAT_TRIAL_DIR=str(self._folder),
        )
        # As in an activated environment: DeepSpeed compiles with the ninja that is found first, and
        # another version of ninja would compile everything anew.
        programs, path = os.path.dirname(self._interpreter), env.get("PATH", os.defpath)
        if programs not in path.split(os.pathsep):
            env["PATH"] = os.pathsep.join([programs, path])
        env.update(share.host.machine.variables_of(share.slots or (0,)))
        ranks = self._ranks_per_host
        env.update(settings_of_ranks(self._machine, self.program, self.config, ranks, env))
        env.update(accelerate_env.for_parallelism(env, self.config, self._ranks))
        if not self.is_forked:
            # An interpreter of another environment must not see what is installed beside dsat.
            packages = self.linked_packages() if self.program.interpreter else _PACKAGE.parent
            found = [env.get("PYTHONPATH"), str(packages)]
            env["PYTHONPATH"] = os.pathsep.join(filter(None, found))
        return env

    def requests(self, cwd: Path) -> dict[int, dict[str, Any]]:
        """Return the requests to the supervisors by host, to be run in the folder `cwd`."""
        found = {}
        for cross_rank, share in enumerate(self.shares):
            first = cross_rank * self._ranks_per_host
            ranks = [
                {
                    "env": self.environment(first + local),
                    "cores": cores_of(share, local, self.program, self.config),
                }
                for local in range(share.ranks)
            ]
            found[share.index] = {
                **self._request(cwd, ranks, cross_rank),
                "command": None if self.is_forked else self._fresh_command,
            }
        return found

    def command_text(self, cwd: Path) -> str:
        """Return the program, and a command for each rank that a person can paste into a shell."""
        chosen = self.start.trial.script_args
        ranks = []
        for rank in range(self._ranks):
            words = assignments(self.environment(rank))
            line = " ".join(["env", *words, shlex.join(self._fresh_command)])
            host = self.shares[rank // self._ranks_per_host].host.name
            ranks.append(f"# on {host}\n{line}" if len(self.shares) > 1 else line)
        words = words_without_secrets(self.program.command())
        lines = [f"# {shlex.join(words)}"]
        lines += [f"# with {switches.write(name, value)}" for name, value in chosen.items()]
        lines.append(f"cd {shlex.quote(str(cwd.resolve()))}")
        return "\n".join([*lines, " &\n".join(ranks)]) + "\n"

    def linked_packages(self) -> Path:
        """Return a folder with dsat, and with what it needs that the interpreter lacks."""
        together = self._folder / "packages"
        together.mkdir(exist_ok=True)
        needed = [_PACKAGE]
        if self.program.lacks_wrapt:
            needed.append(Path(wrapt.__file__).parent)
        for path in needed:
            link = together / path.name
            if not link.is_symlink():
                link.symlink_to(path)
        return together

    def _request(
        self, cwd: Path, ranks: list[dict[str, Any]], cross_rank: int = 0
    ) -> dict[str, Any]:
        """Return a request without its command."""
        return {
            "op": "launch",
            "trial": self.start.trial.id,
            "folder": str(self._folder),
            "cwd": str(cwd.resolve()),
            "port": self.ports[0],
            "ranks": ranks,
            "logs": log_files(cross_rank),
            "linger_s": None if self.start.trial.id == FULL_RUN_ID else LINGER_S,
        }

    @property
    def _folder(self) -> Path:
        return self.start.folder.resolve()

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
    def _fresh_command(self) -> list[str]:
        module = ["-m", "dsat.in_trial.rank", str(self._folder)]
        return [self._interpreter, *self.program.python_options, *module]

    @property
    def _interpreter(self) -> str:
        return self.program.interpreter or sys.executable


def log_files(cross_rank: int) -> list[str]:
    """Return the log files of a host's ranks: two hosts cannot append to the same file."""
    part = f"-{cross_rank}" if cross_rank else ""
    return [f"stdout{part}.log", f"stderr{part}.log"]


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


def assignments(env: Mapping[str, str]) -> list[str]:
    """Return a shell's assignments of variables that differ from this process's."""
    return [
        assignment(name, value)
        for name, value in sorted(env.items())
        if os.environ.get(name) != value
    ]


def _max_length(config: Mapping[str, Any]) -> int:
    """Return the length of a full run: `searcher.max_length`, a number or `{unit: number}`."""
    length = ds_config.at(config, "searcher.max_length")
    if isinstance(length, Mapping):
        [length] = length.values()
    return 1 if length is None else int(length)
