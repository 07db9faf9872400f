"""What the user wants run: an experiment or a command, read from its files and checked."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsat.engines.local import Host, LocalEngine, LocalOptions, command_recorder
from dsat.errors import UserInputError
from dsat.inputs import ds_config, recorded_start
from dsat.inputs import entrypoint as entrypoints
from dsat.inputs import experiment as experiments
from dsat.inputs.entrypoint import Entrypoint, UnknownStart
from dsat.inputs.experiment import Experiment
from dsat.inputs.recorded_start import RankStart
from dsat.inputs.settings import Target
from dsat.values import slow
from dsat.values.trial import TrialOptions

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """An experiment, or a command as one.

    Attributes:
        program: the entrypoint, taken apart.
        is_command: it was not an experiment's configuration.
        config_known: False if only the script itself knows its DeepSpeed configuration.
        start_known: False if only running the command tells which program its ranks run.
        ds_config: the configuration that the user names beside the command.
    """

    experiment: Experiment
    program: Entrypoint
    is_command: bool
    config_known: bool = True
    start_known: bool = True
    ds_config: Path | None = None

    def with_known_start(self, timeout_s: float) -> Source:
        """This with the program that its ranks run, for which the command may have to be run once.

        Raises:
            UserInputError: the command is not one training on one machine.
            ScriptFailed: it does not come to its training.
        """
        if self.start_known:
            return self
        command = self.program.started_by
        _log.info("running `%s` once, to see how it starts its training", shlex.join(command))
        folder = Path(tempfile.mkdtemp(prefix="dsat-"))
        ranks = command_recorder.record(command, Path.cwd(), folder, timeout_s=timeout_s)
        shutil.rmtree(folder)  # of a command that failed it holds the log
        cores = os.sched_getaffinity(0)
        program = recorded_start.program_of(ranks, command, os.environ, cores)
        program = replace(program, started_in=str(Path.cwd()))
        _log.info("%s", _recognised(program))
        return _of_start(self, ranks, program)

    def slots_per_trial(self, given: int | None, available: int) -> int:
        """The slots of a trial: as many as are given, or as the user's files say.

        Args:
            available: to a launcher that takes all.

        Raises:
            UserInputError: the entrypoint starts another number of ranks.
        """
        program = self.program
        if not self.is_command:
            slots = given or self.experiment.slots_per_trial
        else:
            slots = given or program.slots or (available if program.takes_all_slots else 1)
        check_ranks(program, slots)
        return slots

    def with_known_config(
        self,
        hosts: Sequence[Host],
        slots: int,
        timeout_s: float,
    ) -> Source:
        """This with its DeepSpeed configuration, for which the script may have to be asked.

        Raises:
            ScriptFailed: the script does not come so far.
        """
        if self.config_known:
            return self
        own = self.experiment
        with slow.told(_log, "asking your script for its DeepSpeed configuration"):
            captured = _capture(own, self.program, hosts, slots, timeout_s)
        assert not isinstance(own.entrypoint, str)
        known = experiments.of_dict(own.entrypoint, own.name, own.model_dir, captured)
        known = replace(known, arg_mappings=own.arg_mappings)
        return replace(self, experiment=known, config_known=True)


def read(target: Target) -> Source:
    """Reads what is to be run; starts nothing.

    Raises:
        UserInputError: something of it is wrong.
    """
    if not target.command:
        experiment = read_experiment(target)
        program = entrypoints.parse(experiment.entrypoint, experiment.model_dir)
        check_config_path(experiment, program)
        return Source(experiment, program, is_command=False)
    if any("\x00" in word for word in target.command):
        raise UserInputError("holds a NUL character", where="command")
    folder = Path.cwd()
    try:
        program = entrypoints.parse(target.command, folder)
    except UnknownStart:
        return _unknown(target)
    if entrypoints.starts_its_ranks(target.command, folder):
        return _unknown(target)
    config = _config_of_command(target.ds_config, program, folder)
    experiment = experiments.of_command(target.command, _name(program), folder, config)
    known = config is not None or bool(program.trial_class)
    return Source(experiment, program, is_command=True, config_known=known)


def read_experiment(target: Target) -> Experiment:
    """Reads an experiment's configuration, whatever its entrypoint is.

    Raises:
        UserInputError: something of it is wrong.
    """
    assert target.config is not None and target.model_dir is not None
    return experiments.read(target.config, target.model_dir, target.include)


def check_ranks(program: Entrypoint, slots: int) -> None:
    if program.slots not in (None, slots):
        raise UserInputError(
            f"starts {program.slots} ranks, but a trial has {slots} slots",
            where="entrypoint",
            hint="Make resources.slots_per_trial (or --slots) and the entrypoint agree.",
        )


def check_config_path(experiment: Experiment, program: Entrypoint) -> None:
    given, known = program.config_path, experiment.hparams[ds_config.CONFIG_KEY]
    if given is None or not isinstance(known, str):
        return
    if os.path.normpath(given) != os.path.normpath(known):
        raise UserInputError(
            f"names the DeepSpeed configuration {given!r}, but hyperparameters."
            f"{ds_config.CONFIG_KEY} is {known!r}",
            where=f"{experiment.path}: entrypoint",
            hint="Make both the same.",
        )


def _config_of_command(given: Path | None, program: Entrypoint, folder: Path) -> Path | None:
    """The DeepSpeed configuration: what `--ds-config` names, or the script's own arguments."""
    named = None if program.config_path is None else folder / program.config_path
    if given is not None and not given.is_file():
        raise UserInputError("there is no such file", where=f"--ds-config {given}")
    if named is not None and not named.is_file():
        raise UserInputError(
            "there is no such file", where=f"{program.config_path}, in the script's arguments"
        )
    if given is None:
        return named
    if named is not None and not os.path.samefile(given, named):
        raise UserInputError(
            f"is not {program.config_path}, which the script's arguments name",
            where=f"--ds-config {given}",
            hint="Make both the same, or leave --ds-config out.",
        )
    return given


def _unknown(target: Target) -> Source:
    """A command of which only its own start tells more."""
    command = list(target.command)
    env = entrypoints.take_assignments(command)
    if shutil.which(command[0]) is None:
        raise UserInputError(
            "there is no such command", where=command[0], hint="Give it as you type it in a shell."
        )
    if env:  # as a shell has them
        command = ["env", *(f"{name}={value}" for name, value in env.items()), *command]
    program = Entrypoint(started_by=tuple(command))
    experiment = experiments.of_command(target.command, Path(command[0]).name, Path.cwd(), None)
    return Source(
        experiment,
        program,
        is_command=True,
        config_known=False,
        start_known=False,
        ds_config=target.ds_config,
    )


def _of_start(source: Source, ranks: Sequence[RankStart], program: Entrypoint) -> Source:
    """What a command runs, with the configuration that its training was given."""
    first = min(ranks, key=lambda rank: rank.rank)
    folder, name, words = Path(first.cwd), _name(program), list(program.started_by)
    if not folder.is_dir():  # the command has removed it at its end
        folder = Path(program.started_in)
    named = program.config_path
    is_gone = named is not None and not (folder / named).is_file()
    path = _config_of_command(source.ds_config, Entrypoint() if is_gone else program, folder)
    if path is not None:
        experiment = experiments.of_command(words, name, folder, path)
    elif first.config is not None:
        experiment = experiments.of_dict(words, name, folder, dict(first.config))
    else:
        raise UserInputError(
            "the configuration that the script passes to deepspeed.initialize cannot be written "
            f"as JSON: {first.config_problem}",
            where=name,
            hint="Give it as a file: --ds-config FILE.",
        )
    experiment = replace(experiment, arg_mappings=source.experiment.arg_mappings)
    return replace(
        source, experiment=experiment, program=program, start_known=True, config_known=True
    )


def _recognised(program: Entrypoint) -> str:
    """What was seen of a command, for people."""
    ranks = f"{program.slots} ranks" if program.slots != 1 else "1 rank"
    if program.needs_command:
        return (
            f"it starts {ranks}; each trial runs your command again: its ranks cannot be started "
            f"by themselves, because {program.needs_command}"
        )
    words = [program.script] if program.script else ["-m", program.module]
    shown = shlex.join(["python", *words, *program.args])
    python = f" with {program.interpreter}" if program.interpreter else ""
    return f"it starts {ranks} of `{shown}`{python}; from now on dsat starts them itself"


def _capture(
    experiment: Experiment,
    program: Entrypoint,
    hosts: Sequence[Host],
    slots: int,
    timeout_s: float,
) -> dict[str, Any]:
    """What the script itself passes to `deepspeed.initialize`."""
    options = LocalOptions(TrialOptions(timeout_s=timeout_s), cold=True)
    folder = Path(tempfile.mkdtemp(prefix="dsat-"))
    engine = LocalEngine(experiment, program, hosts, folder, options, slots_per_trial=slots)
    try:
        config = engine.capture_config()
    finally:
        engine.close()
    shutil.rmtree(folder)  # of a script that failed it holds the log
    return config


def _name(program: Entrypoint) -> str:
    if program.script:
        return Path(program.script).stem
    return program.module or program.trial_class or Path(program.started_by[0]).name
