"""The experiment or command to tune, read from its files and checked."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsat.command import ds_config, own_files, recorded_start, script_args
from dsat.command import entrypoint as entrypoints
from dsat.command import experiment as experiments
from dsat.command.entrypoint import Entrypoint, UnknownStart
from dsat.command.experiment import Experiment
from dsat.command.placement import VISIBLE
from dsat.command.recorded_start import RankStart
from dsat.engines.own_command import OwnCommand
from dsat.errors import UserInputError
from dsat.in_trial.hook import TRIAL_VARIABLE
from dsat.in_trial.script_api import hparams_of_this_task
from dsat.prepare.command_words import (
    CONFIG_SUFFIXES,
    check_form,
    check_options,
    make_startable,
    other_python,
)
from dsat.prepare.target import Target
from dsat.values import format as fmt
from dsat.values.parallelism import SEQUENCE_SIZE
from dsat.values.trial import TrialOptions

_log = logging.getLogger(__name__)
# What only a run of the command may show: the program and configuration of its ranks, or, if the
# script makes the configuration, only this.
PROGRAM, CONFIG = "program", "configuration"


@dataclass(frozen=True)
class Source:
    """An experiment, or a command represented as one.

    Attributes:
        unknown: `PROGRAM` or `CONFIG` if only a run of the command shows it; else empty.
        ds_config: file of `--ds-config`; None if it is not given, or if arguments name the file.
        is_script: whether an unknown program is a script without a launcher.
    """

    experiment: Experiment
    program: Entrypoint
    unknown: str = ""
    ds_config: Path | None = None
    is_script: bool = False

    @property
    def command(self) -> tuple[str, ...]:
        """The user's command; empty for an experiment."""
        return self.program.started_by

    def can_run_first(self) -> bool:
        """Return whether the unchanged command trains the user's configuration.

        False with a launcher or Trial of Determined, a hostfile, `--ds-config` (see `ds_config`),
        lists of values, or an `autotuning` section.
        """
        program = self.program
        return (
            bool(self.command)
            and not (program.trial_class or program.launch.hosts or self.ds_config)
            and not any("determined" in word for word in self.command)
            and not (self.experiment.choices or ds_config.AUTOTUNING in self.experiment.ds_config)
        )

    def first_run(self, options: TrialOptions, slots: int | None) -> OwnCommand:
        """Start the user's command as the first trial; a plain script gets `slots` (or 1) ranks."""
        return OwnCommand(self.command, Path.cwd(), options, ranks=self._ranks(slots))

    def _ranks(self, slots: int | None) -> int | None:
        """Return the number of ranks of a plain script; None if the command starts them."""
        program = self.program
        is_plain = self.unknown != PROGRAM and not program.launcher
        return (slots or 1) if is_plain or self.is_script else None

    def run_to_training(self, timeout_s: float, slots: int | None = None) -> Source:
        """Run the command up to its training; return the source with facts that the run shows."""
        _log.info("running `%s` up to its training", shlex.join(self.command))
        # Instead of a command for several hosts, one rank of its script runs here.
        launch = self.program.launch
        runs_command = not launch.hosts and launch.nodes == 1
        run = OwnCommand(
            self.command if runs_command else self.program.command(),
            Path.cwd(),
            TrialOptions(timeout_s=timeout_s),
            measures=False,
            ranks=self._ranks(slots) if runs_command else 1,
        )
        try:
            if self.unknown == PROGRAM or self.can_run_first():
                return self.complete_from_record(run)
            return _make_from_start(self, run.ranks(), self.program)
        finally:
            run.close()

    def complete_from_record(self, run: OwnCommand) -> Source:
        """Return the source with the program and configuration that a running command shows."""
        ranks, cores = run.ranks(), os.sched_getaffinity(0)
        program = recorded_start.recognise_program(ranks, self.command, run.env, cores)
        file, launch = own_files.form_of_training(self.command, Path.cwd()), self.program.launch
        by_launcher = launch.devices or launch.not_devices  # the launcher sets the variable
        env = {n: v for n, v in program.env.items() if not (by_launcher and n in VISIBLE)}
        program = replace(
            program,
            env=env,
            started_in=str(Path.cwd()),
            launch=replace(
                program.launch,
                batch_in_file=file is not None and not file.is_strict,
                devices=launch.devices,
                not_devices=launch.not_devices,
            ),
        )
        if self.unknown == PROGRAM or program.needs_command:
            _log.info("%s", _describe_program(program))
        return _make_from_start(self, ranks, program)

    def slots_per_trial(self, given: int | None, available: int) -> int:
        """Return the number of devices of a trial: `given`, or what the user's files imply.

        Raises UserInputError if the command starts another number of ranks.
        """
        program = self.program
        if not self.command:
            slots = given or self.experiment.slots_per_trial
        else:
            slots = given or program.slots or (available if program.launch.takes_all else 1)
        check_ranks(program, slots)
        return slots


def read(target: Target) -> Source:
    """Read the target without running it.

    Raises:
        UserInputError: the target is wrong, or this process is a trial.
    """
    refuse_in_trial()
    if not target.command:
        experiment = read_experiment(target)
        program = entrypoints.parse(experiment.entrypoint, experiment.model_dir)
        check_options(program)
        check_config_path(experiment, program)
        return Source(experiment, program)
    folder, command = Path.cwd(), tuple(entrypoints.drop_autotuning(target.command))
    if command != target.command:
        _log.info("note: dsat runs your command without --autotuning, which dsat replaces")
        target = replace(target, command=command)
    check_form(command)
    python = other_python(command)
    try:
        program = entrypoints.parse(target.command, folder, python or "")
    except UnknownStart:
        return _unknown(target)
    check_options(program)
    if entrypoints.starts_its_ranks(command, folder):
        return _unknown(target)
    if python is None:
        return replace(_unknown(target), is_script=not program.launcher)
    program = _mark_word(program, folder)
    config = _config_of_command(target.ds_config, program, folder)
    experiment = experiments.make_experiment(target.command, _name(program), folder, config or {})
    unknown = CONFIG if config is None and not program.trial_class else ""
    started_by = make_startable(target.command, is_known=not python)
    program = replace(program, started_by=started_by)
    config_file = None if program.config_path is not None else target.ds_config
    return Source(experiment, program, unknown, config_file)


def refuse_in_trial() -> None:
    """Raise UserInputError inside a trial, to prevent endless recursion."""
    is_cluster_trial = ds_config.DSAT_TRIAL_KEY in (hparams_of_this_task() or {})
    if is_cluster_trial or TRIAL_VARIABLE in os.environ:
        raise UserInputError(
            "was called inside a trial: the training script itself calls dsat",
            where="dsat",
            hint="Call dsat from a separate file. If the training script imports that file, put "
            'the call below `if __name__ == "__main__":`.',
        )


def read_experiment(target: Target) -> Experiment:
    """Read an experiment's configuration without checking its entrypoint."""
    assert target.config is not None and target.model_dir is not None
    return experiments.read(target.config, target.model_dir, target.include)


def check_ranks(program: Entrypoint, slots: int) -> None:
    """Raise UserInputError if the entrypoint names a number of ranks other than `slots`."""
    if program.slots not in (None, slots):
        raise UserInputError(
            f"starts {fmt.count(program.slots, 'rank')}, but a trial has "
            f"{fmt.count(slots, 'device')}",
            where="entrypoint",
            hint="Set resources.slots_per_trial (or --devices) to the number of ranks.",
        )


def check_config_path(experiment: Experiment, program: Entrypoint) -> None:
    """Raise UserInputError if entrypoint and hyperparameters name different DeepSpeed files."""
    path, file = program.config_path, experiment.hparams[ds_config.CONFIG_KEY]
    if path is None or not isinstance(file, str):
        return
    if os.path.normpath(path) != os.path.normpath(file):
        raise UserInputError(
            f"names the DeepSpeed configuration {path!r}, but hyperparameters."
            f"{ds_config.CONFIG_KEY} is {file!r}",
            where=f"{experiment.path}: entrypoint",
            hint="Make both the same.",
        )


def _mark_word(program: Entrypoint, folder: Path) -> Entrypoint:
    path = program.config_path
    if path is None or os.path.isfile(folder / path):
        return program
    # A script may look for the file in its own folder.
    is_beside = os.path.isfile(folder / Path(program.script).parent / path)
    is_word = (is_beside or not path.endswith(CONFIG_SUFFIXES)) and path[0] != "/"
    return replace(program, launch=replace(program.launch, config_is_word=is_word))


def _config_of_command(option: Path | None, program: Entrypoint, folder: Path) -> Path | None:
    """Return the configuration in `--ds-config` or the arguments; None if neither names one."""
    path = None if program.config_path is None else folder / program.config_path
    if option is not None and not option.is_file():
        raise UserInputError("there is no such file", where=f"--ds-config {option}")
    if path is not None and not os.path.isfile(path):
        raise UserInputError(
            "there is no such file", where=f"{program.config_path}, in the script's arguments"
        )
    if option is None:
        return path
    if path is not None and not os.path.samefile(option, path):
        raise UserInputError(
            f"differs from {program.config_path} in the script's arguments",
            where=f"--ds-config {option}",
            hint="Make both the same, or remove --ds-config.",
        )
    return option


def _unknown(target: Target) -> Source:
    command = make_startable(target.command, is_known=False)
    program = Entrypoint(started_by=command)
    experiment = experiments.make_experiment(target.command, Path(command[0]).name, Path.cwd(), {})
    return Source(experiment, program, PROGRAM, target.ds_config)


def _make_from_start(source: Source, ranks: Sequence[RankStart], program: Entrypoint) -> Source:
    first = min(ranks, key=lambda rank: rank.rank)
    folder, name = Path(first.cwd), _name(program)
    words = list(program.started_by)
    if source.unknown != PROGRAM:
        assert not isinstance(source.experiment.entrypoint, str)
        words = list(source.experiment.entrypoint)
    if not folder.is_dir():  # removed when the command ended
        folder = Path(program.started_in)
    program = _mark_word(program, folder)
    if program.config_path is None and first.config is not None:
        program = replace(program, config_word=_find_config(program.args, folder, first.config))
    config_path = program.config_path
    is_gone = config_path is not None and not os.path.isfile(folder / config_path)
    is_file = source.ds_config is None and config_path is not None and not is_gone
    if is_file and _changes(ds_config.read(folder / str(config_path)), first.config or {}):
        # The file alone does not decide, so trials replace what the script passes.
        launch = replace(program.launch, config_is_word=True)
        program = replace(program, launch=launch, config_word="")
    path = _config_of_command(source.ds_config, Entrypoint() if is_gone else program, folder)
    config = path or first.config
    if config is None:
        raise UserInputError(
            "the configuration that the script passes to deepspeed.initialize cannot be written "
            f"as JSON: {first.config_problem}",
            where=name,
            hint="Write the configuration to a file, and pass it with --ds-config FILE.",
        )
    experiment = experiments.make_experiment(words, name, folder, config)
    experiment = replace(
        experiment,
        arg_mappings=source.experiment.arg_mappings,
        ds_config={**experiment.ds_config, **_find_sizes(experiment.ds_config, first.config)},
    )
    return replace(source, experiment=experiment, program=program, unknown="")


def _find_config(args: Sequence[str], folder: Path, config: Mapping[str, Any]) -> str:
    """Return the argument that names the file of the passed configuration; empty if none does.

    The script may have replaced "auto" values and added settings.
    """
    actual = ds_config.flat(config)
    for word in args:
        path = folder / script_args.path_in(word)
        # `isfile` is False for names that are too long.
        if path.suffix in CONFIG_SUFFIXES and os.path.isfile(path):
            with contextlib.suppress(UserInputError):
                file = ds_config.flat(ds_config.read(path))
                if file and all(
                    k in actual and v in (ds_config.AUTO, actual[k]) for k, v in file.items()
                ):
                    return word
    return ""


def _changes(file_config: Mapping[str, Any], actual_config: Mapping[str, Any]) -> bool:
    """Return whether the script's code changes batch sizes or the stage of its file.

    Adding DeepSpeed's defaults, or the global batch size to a micro batch, is no change.
    """
    total, micro, gas = ds_config.BATCH_KEYS
    stage = "zero_optimization.stage"
    file, actual = (
        {key: value for key, value in ds_config.flat(config).items() if value is not None}
        for config in (file_config, actual_config)
    )
    keys = [micro, gas, stage]
    if total in file or micro not in file:
        keys.append(total)
    file = {gas: 1, stage: 0, **file}
    return any(key in actual and file.get(key) not in (ds_config.AUTO, actual[key]) for key in keys)


def _find_sizes(file_config: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the script's values of "auto" batch sizes and of the sequence-parallel size."""
    _, *sizes = ds_config.BATCH_KEYS  # the global batch size follows from the others
    autos = [key for key in sizes if file_config.get(key) == ds_config.AUTO]
    values = {key: (config or {}).get(key) for key in [*autos, SEQUENCE_SIZE]}
    return {key: value for key, value in values.items() if isinstance(value, int)}


def _describe_program(program: Entrypoint) -> str:
    ranks = f"{program.slots} ranks" if program.slots != 1 else "1 rank"
    if program.needs_command:
        return (
            f"Your command starts {ranks}. Each trial runs the whole command, because dsat cannot "
            f"start its ranks itself: {program.needs_command}"
        )
    words = [program.script] if program.script else ["-m", program.module]
    command = shlex.join(["python", *words, *program.args])
    python = f" with {program.interpreter}" if program.interpreter else ""
    return f"Your command starts {ranks} of `{command}`{python}. Trials start them directly."


def _name(program: Entrypoint) -> str:
    if program.script:
        return Path(program.script).stem
    return program.module or program.trial_class or Path(program.started_by[0]).name
