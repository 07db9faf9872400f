"""What the user wants run: an experiment or a command, read from its files and checked."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsat.engines.local import LocalEngine, LocalOptions, Machine
from dsat.errors import UserInputError
from dsat.inputs import ds_config
from dsat.inputs import entrypoint as entrypoints
from dsat.inputs import experiment as experiments
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment
from dsat.inputs.settings import Target
from dsat.values.trial import TrialOptions


@dataclass(frozen=True)
class Source:
    """An experiment, or a command as one.

    Attributes:
        program: the entrypoint, taken apart.
        is_command: it was not an experiment's configuration.
        config_known: False if only the script itself knows its DeepSpeed configuration.
    """

    experiment: Experiment
    program: Entrypoint
    is_command: bool
    config_known: bool = True

    def slots_per_trial(self, given: int | None, machine: Machine) -> int:
        """The slots of a trial: as many as are given, or as the user's files say.

        Raises:
            UserInputError: the entrypoint starts another number of ranks.
        """
        program = self.program
        if not self.is_command:
            slots = given or self.experiment.slots_per_trial
        else:
            slots = given or program.slots or (machine.num_slots if program.takes_all_slots else 1)
        check_ranks(program, slots)
        return slots

    def with_known_config(self, machine: Machine, slots: int, timeout_s: float) -> Source:
        """This with its DeepSpeed configuration, for which the script may have to be asked.

        Raises:
            ScriptFailed: the script does not come so far.
        """
        if self.config_known:
            return self
        own = self.experiment
        captured = _capture(own, self.program, machine, slots, timeout_s)
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
    folder = Path.cwd()
    program = entrypoints.parse(target.command, folder)
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


def _capture(
    experiment: Experiment, program: Entrypoint, machine: Machine, slots: int, timeout_s: float
) -> dict[str, Any]:
    """What the script itself passes to `deepspeed.initialize`."""
    options = LocalOptions(TrialOptions(timeout_s=timeout_s), cold=True)
    folder = Path(tempfile.mkdtemp(prefix="dsat-"))
    engine = LocalEngine(experiment, program, machine, folder, options, slots_per_trial=slots)
    try:
        config = engine.capture_config()
    finally:
        engine.close()
    shutil.rmtree(folder)  # of a script that failed it holds the log
    return config


def _name(program: Entrypoint) -> str:
    if program.script:
        return Path(program.script).stem
    return program.module or program.trial_class
