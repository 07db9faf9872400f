"""Builder of a trial's folder, and of the requests to supervisors that start its ranks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsat.command import accelerate_env, ds_config, switches
from dsat.command.entrypoint import Entrypoint
from dsat.command.experiment import Experiment, length_in_units, length_of_full_run, trial_hparams
from dsat.engines import trial_folder
from dsat.engines.agent import leftovers
from dsat.engines.machines.hosts import Share
from dsat.engines.ports import free_ports
from dsat.engines.rank_settings import find_cores, make_command_settings, make_rank_settings
from dsat.engines.start import FULL_RUN_ID, SIMULATION_ID, LocalOptions, Start, StartMethod
from dsat.engines.trial_folder import COMMAND_FILE, PACKAGES_FOLDER, TRIALS_FOLDER, log_files
from dsat.in_trial.adapters.launchers import ALONE_VARIABLE
from dsat.in_trial.adapters.trackers import variables_off
from dsat.in_trial.hook import CHANGES_FILE, HOOK_FOLDER, RUN_VARIABLE, TRIAL_VARIABLE
from dsat.in_trial.loopback import ADDRESS, INTERFACES, is_loopback
from dsat.in_trial.memory_limit import MALLOC_VARIABLES
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.rank_files import CONFIG_FILE, SPEC_FILE, LocalTask, RankSpec
from dsat.simulation.server import CAPTURED_MICRO_BATCH
from dsat.space.overrides import overrides_for
from dsat.values import parallelism, zero_strategy
from dsat.values.files import PRIVATE_FOLDER, remove, write_atomically
from dsat.values.parallelism import DATA_ONLY
from dsat.values.text import assignment, hide_secrets_in_values, shell_line, shell_word
from dsat.values.trial import BatchTriple, Trial, TrialKind

_SHOWN_TO_SCRIPTS = frozenset(
    """
    checkpoint_policy data debug description entrypoint labels max_restarts min_checkpoint_period
    min_validation_period name optimizations perform_initial_validation profiling project
    records_per_epoch reproducibility resources scheduling_unit searcher workspace
    """.split()
)


@dataclass(frozen=True)
class StartBuilder:
    """Builder of the starts of a run's trials, which share these attributes.

    Attributes:
        program: the parsed entrypoint of the experiment.
        run: folder of the run.
        slots: slots of each trial.
        host_slots: slots of each host.
    """

    experiment: Experiment
    program: Entrypoint
    run: Path
    cwd: Path
    options: LocalOptions
    slots: int = 0
    host_slots: int = 0

    def start_of(self, trial: Trial) -> Start:
        """Return the start of a trial of the search."""
        meter = MeterSpec.build(
            trial, self.options.trial, slots=self.slots, host_slots=self.host_slots
        )
        return Start(trial, self.run / TRIALS_FOLDER / trial.name, meter)

    def simulation(self, messages: Path, script_args: Mapping[str, Any]) -> Start:
        """Return a start of the script for simulations of its model, with a single rank.

        Its stage is 3 if the user's configuration has stage 3, else 0: a script may enter
        `zero.Init` only in stage 3.
        """
        batch = BatchTriple(CAPTURED_MICRO_BATCH, CAPTURED_MICRO_BATCH, 1)
        config = self.experiment.base_config
        alone = {} if parallelism.read_parallelism(config) == DATA_ONLY else DATA_ONLY.settings
        stage = 3 if zero_strategy.read_strategy(config).stage == 3 else 0
        trial = Trial(
            SIMULATION_ID,
            TrialKind.SEARCH,
            "simulation",
            0,
            batch,
            overrides_for({**alone, "stage": stage}, batch),
            script_args=script_args,
        )
        return Start(trial, self.run / "simulation", None, messages)

    def config_of(self, start: Start) -> dict[str, Any]:
        return ds_config.prepare_for_training(self.experiment.base_config, start.trial.overrides)

    def build(
        self, start: Start, shares: tuple[Share, ...], method: StartMethod
    ) -> Mapping[int, Mapping[str, Any]]:
        """Write a trial's folder; return the requests that start its ranks, by host.

        `shares` must be in the order of the ranks.
        """
        folder = start.folder
        config, program = self.config_of(start), self.program
        if not start.is_own:
            remove(folder)  # of an earlier attempt, or of a dsat that was killed
            folder.mkdir(mode=PRIVATE_FOLDER, parents=True)
            trial, path = start.trial, folder / CONFIG_FILE
            swap = leftovers.choose_swap_folders(config, self.run, trial.name)
            trial = replace(trial, overrides=ds_config.merge(trial.overrides, swap))
            start = replace(start, trial=trial)
            config = self.config_of(start)
            write_atomically(path, json.dumps(config, indent=2) + "\n")
            program = program.use_config(
                str(path.resolve()),
                config,
                trial.script_args,
                self.experiment.arg_mappings,
                flags=trial.flags,
                flag_leads=trial.flag_leads,
            )
        prepared = _PreparedStart(
            self, start, shares, method, program, config, tuple(free_ports(3))
        )
        if start.is_own and start.meter is None:  # its ranks are only recorded
            return prepared.requests()
        write_atomically(folder / SPEC_FILE, json.dumps(prepared.spec().to_json(), indent=1) + "\n")
        if method is StartMethod.COMMAND and not start.is_own:
            write_atomically(folder / CHANGES_FILE, json.dumps(prepared.changes()))
        write_atomically(folder / COMMAND_FILE, prepared.command_text())
        return prepared.requests()


@dataclass
class _PreparedStart:
    """Everything that one start of a trial's ranks needs.

    Attributes:
        program: entrypoint with the trial's configuration.
        ports: three ports that are free on this machine: for rank 0, and two for Determined.
        machine: the machine of the first host; all are alike.
        addresses: the hosts' addresses; loopback if there is only one host.
    """

    builder: StartBuilder
    start: Start
    shares: tuple[Share, ...]
    method: StartMethod
    program: Entrypoint
    config: Mapping[str, Any]
    ports: tuple[int, ...]

    def __post_init__(self) -> None:
        first, *rest = self.shares
        self.machine = first.host.machine
        self.ranks_per_host = first.ranks
        self.ranks = first.ranks * len(self.shares)
        self.addresses = [share.host.address for share in self.shares] if rest else [ADDRESS]
        self.is_command = self.method is StartMethod.COMMAND
        started_in = self.program.started_in if self.is_command else ""
        self.cwd = Path(started_in or self.builder.cwd).resolve()
        self.folder = self.start.folder.resolve()
        is_wanted = self.builder.options.trial.slot_memory_bytes is not None
        on_cpu = self.machine.is_cpu or self.start.is_own
        self.limits_memory = is_wanted and on_cpu and self.start.meter is not None

    def spec(self) -> RankSpec:
        """Return the specification that every rank reads."""
        start, experiment, options = self.start, self.builder.experiment, self.builder.options
        trial, meter, messages = start.trial, start.meter, start.simulation_folder
        hparams = trial_hparams(experiment.hparams, trial.overrides)
        # Other keys may hold credentials, which dsat must not write to files.
        config = {k: v for k, v in experiment.config.items() if k in _SHOWN_TO_SCRIPTS}
        length = length_of_full_run(config)
        if meter is not None:
            hparams[ds_config.DSAT_MODE_KEY] = True
            length = length_in_units(meter.longest, config, trial.batch)
        if meter is not None or messages is not None:  # not a full-length run
            config["searcher"] = {**dict(config.get("searcher") or {}), "name": "custom"}
        is_cpu, memory_bytes = self.machine.is_cpu, options.trial.slot_memory_bytes
        devices = self.machine.devices_of(self.shares[0].slots or (0,))
        return RankSpec(
            trial=trial,
            program=replace(self.program, env={}),
            task=LocalTask(
                trial_id=max(trial.id, 0),
                slots=self.ranks,
                hparams=hparams,
                experiment_config=config,
                length=length,
                seed=options.seed,
                ports=self.ports[1:],
                devices=[] if is_cpu else devices,
                hosts=self.addresses,
            ),
            meter=meter,
            simulation_folder=None if messages is None else str(messages),
            cpu_memory_bytes=memory_bytes if self.limits_memory else None,
            threads=1 if is_cpu else None,
            own=start.is_own,
            is_command=self.is_command,
            defaults_local_rank=(
                (start.is_own or not self.is_command)
                and self.ranks > 1
                and not self.program.launch.passes_local_rank
            ),
        )

    def requests(self) -> dict[int, dict[str, Any]]:
        """Create the folder of the hook, and return the requests to supervisors, by host."""
        trial_folder.make_hook(self.folder)
        requests = {}
        processes = 1 if self.is_command and not self.start.is_own else self.ranks_per_host
        for cross_rank, share in enumerate(self.shares):
            first = cross_rank * self.ranks_per_host
            requests[share.index] = {
                "op": "launch",
                "trial": self.start.trial.id,
                "folder": str(self.folder),
                "cwd": str(self.cwd),
                "port": self.ports[0],
                "ranks": [self._process(first + local) for local in range(processes)],
                "logs": log_files(cross_rank),
                "fork": self.method is StartMethod.FORKED,
                "starts_ranks": not self.is_command,
                "is_full_run": self.start.trial.id == FULL_RUN_ID,
                "swap": [] if self.start.is_own else leftovers.swap_folders(self.config),
            }
        return requests

    def changes(self) -> dict[str, Any]:
        """Return arguments and variables that the hook changes in the user's command.

        `env` is a pair: the user's values and the trial's. `args` has such a pair for each rank.
        """
        old, new = self.builder.program, self.program
        args = ([program.args, *program.launch.other_args] for program in (old, new))
        names = [n for n, value in old.env.items() if new.env.get(n) != value]
        additions = {n: value for n, value in new.env.items() if old.env.get(n) != value}
        unnamed = ["-m"] if old.module else ["-c", "-", ""]
        return {
            "programs": [old.script] if old.script else unnamed,
            "args": list(zip(*args, strict=True)),
            "env": [{name: old.env[name] for name in names}, additions],
        }

    def command_text(self) -> str:
        """Return shell commands that repeat the trial, with secrets hidden."""
        change = f"cd {shell_word(str(self.cwd))}"
        words = self._command(0) if self.is_command else self.program.command()
        command_line = shell_line(words, self.folder)
        if self.start.is_own:
            return f"{change}\n{command_line}\n"
        switch_values = self.start.trial.script_args
        lines = [f"# {command_line}"]
        lines += [
            f"# with {switches.write(name, value)}"
            for name, value in hide_secrets_in_values(switch_values).items()
        ]
        texts = []
        for rank in range(1 if self.is_command else self.ranks):
            command = shell_line(self._command(rank), self.folder)
            variables = sorted(self.environment(rank).items())
            env = [assignment(n, v) for n, v in variables if os.environ.get(n) != v]
            hook_path = f"PYTHONPATH={shell_word(str(self.folder / HOOK_FOLDER))}"
            hook_path += (
                f'"${{PYTHONPATH:+:$PYTHONPATH}}":{shell_word(str(self.folder / PACKAGES_FOLDER))}'
            )
            line = " ".join(["env", *env, hook_path, command])
            host = self.shares[rank // self.ranks_per_host].host.name
            texts.append(f"# on {host}\n{line}" if len(self.shares) > 1 else line)
        return "\n".join([*lines, change, " &\n".join(texts)]) + "\n"

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables of a rank or the user's command, without the hook in PYTHONPATH."""
        builder, share = self.builder, self.shares[rank // self.ranks_per_host]
        is_command = self.is_command
        env = {
            **(INTERFACES if is_loopback(self.addresses[0]) else {}),
            **os.environ,
            **builder.experiment.env,
            "PYTHONUNBUFFERED": "1",
            TRIAL_VARIABLE: str(self.folder),
        }
        if not is_command:
            env |= self.program.env
        if not is_command or self.start.own_ranks:
            env |= self._variables_of_launcher(rank)
        elif not self.start.is_own:  # for a command that does not set them itself
            env |= {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(self.ports[0])}
        if not self.start.is_own:
            env["DS_ACCELERATOR"] = self.machine.accelerator
        if is_command and (self.start.is_own or self.start.meter is not None):
            # If the hook set these in a launcher, they would be recorded as variables of the user.
            env |= variables_off(self.folder)
        if is_command:
            env |= make_command_settings(self.machine, env)
        else:
            env |= share.host.machine.variables_of(share.slots or (0,))
            ranks = self.ranks_per_host
            env |= make_rank_settings(self.machine, self.program, self.config, ranks, env)
        if self.method is StartMethod.FRESH and self.limits_memory:
            # The memory limit itself is set before the first model is built.
            env |= {name: str(value) for name, value in MALLOC_VARIABLES.items()}
        return env | accelerate_env.make_parallelism_variables(env, self.config, self.ranks)

    def _variables_of_launcher(self, rank: int) -> dict[str, str]:
        cross_rank, local_rank = divmod(rank, self.ranks_per_host)
        hosts, ranks_per_host = str(len(self.shares)), str(self.ranks_per_host)
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_SIZE": ranks_per_host,
            "LOCAL_WORLD_SIZE": ranks_per_host,
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(self.ports[0]),
        }
        if self.start.is_own:
            return env | ({ALONE_VARIABLE: "1"} if self.ranks == 1 else {})
        return env | {
            "CROSS_RANK": str(cross_rank),
            "CROSS_SIZE": hosts,
            "GROUP_RANK": str(cross_rank),
            "GROUP_WORLD_SIZE": hosts,
            "USE_DEEPSPEED": "1",
            "DET_CHIEF_IP": self.addresses[0],
        }

    def _process(self, rank: int) -> dict[str, Any]:
        env, command = self.environment(rank), self._command(rank)
        # Not in `cmd.txt`: by these marks, the next dsat would end what a user starts from there.
        env |= {RUN_VARIABLE: str(self.builder.run.resolve()), **leftovers.owner_mark()}
        env["PYTHONPATH"] = self._add_hook(env.get("PYTHONPATH", ""))
        for number, word in enumerate(command if Path(command[0]).name == "env" else ()):
            name, _, value = word.partition("=")
            if name == "PYTHONPATH":
                command[number] = f"{name}={self._add_hook(value)}"
        cross_rank, local_rank = divmod(rank, self.ranks_per_host)
        share = self.shares[cross_rank]
        is_bound = not self.is_command or self.machine.is_cpu
        return {
            "env": env,
            "cores": find_cores(share, local_rank, self.program, self.config) if is_bound else [],
            "command": command,
        }

    def _add_hook(self, path: str) -> str:
        """Add the hook's folder to the front of a `PYTHONPATH`, and dsat's packages to its end."""
        paths = [str(self.folder / HOOK_FOLDER), path, str(self.folder / PACKAGES_FOLDER)]
        if self.builder.experiment.includes:  # the script may be a link to another folder
            paths.insert(2, str(self.cwd))
        return os.pathsep.join(filter(None, paths))

    def _command(self, rank: int) -> list[str]:
        if self.is_command:
            name, *words = self.program.started_by
            return [shutil.which(name) or name, *words]
        program = self.program
        if program.launch.passes_local_rank:
            local_rank = f"--local_rank={rank % self.ranks_per_host}"
            program = replace(program, args=(local_rank, *program.args))
        return program.command()
