"""Preparation of a run: check the user's input, record the command, acquire hosts, plan."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsat import __version__
from dsat.command import script_args
from dsat.command.entrypoint import Entrypoint
from dsat.command.experiment import Experiment
from dsat.engines import places
from dsat.engines.agent import leftovers
from dsat.engines.machines import accelerators
from dsat.engines.machines.hosts import Host, disable_segments
from dsat.engines.machines.machine import Machine
from dsat.engines.own_command import OwnCommand
from dsat.engines.places import ENGINE_NAMES
from dsat.engines.places.base import Environment
from dsat.engines.retries import COMMAND_AGAIN, FRESH_PROCESSES_ONLY, NO_SEGMENTS
from dsat.errors import UserInputError
from dsat.prepare import hosts as hosts_of
from dsat.prepare import installed_deepspeed, packages
from dsat.prepare import source as sources
from dsat.prepare.hosts import all_slots, check_slots, describe
from dsat.prepare.source import Source
from dsat.run.run import Run
from dsat.space.plan import Plan
from dsat.tuning import autotuning_section, plans, run_folders
from dsat.tuning.autotuning_section import Section
from dsat.tuning.command_line import CommandLine
from dsat.tuning.settings import Settings
from dsat.values import hazards, slow
from dsat.values.files import digest
from dsat.values.text import redacted_command

# Why each trial runs the user's command again, after ranks that dsat itself started had failed.
FAILED_BY_THEMSELVES = "when dsat started them in an earlier trial, they failed"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """Everything known before a run begins.

    Attributes:
        line: the search as a command line; None if no command line equals the call from Python.
        hosts: hosts of trials; this machine comes first if it is one of them.
        section: enabled `autotuning` section of the user's DeepSpeed configuration, if any.
        first: the user's command, already running as the first trial; None if it is not running.
        began_s: `time.monotonic` at the start of the preparation, which starts the run's wall time.
    """

    line: CommandLine | None
    settings: Settings
    experiment: Experiment
    program: Entrypoint
    hosts: tuple[Host, ...]
    plan: Plan
    section: Section | None
    first: OwnCommand | None
    began_s: float

    @property
    def machine(self) -> Machine:
        """The machine of any host; all are equal."""
        return self.hosts[0].machine

    @property
    def notes(self) -> list[str]:
        section_notes = () if self.section is None else self.section.notes
        return [*plans.make_notes(self.settings, self.plan), *section_notes]

    def after(self, run: Run) -> Prepared:
        """Return a copy that avoids the problems in starting ranks that earlier trials reported."""
        warnings = {warning for outcome in run.outcomes.values() for warning in outcome.warnings}
        settings, hosts, program = self.settings, self.hosts, self.program
        # The reason may follow in parentheses.
        if any(text.startswith(FRESH_PROCESSES_ONLY) for text in warnings):
            settings = replace(settings, cold=True)
        if NO_SEGMENTS in warnings:
            hosts = tuple(disable_segments(hosts))
        if COMMAND_AGAIN in warnings:
            program = replace(program, needs_command=FAILED_BY_THEMSELVES)
        return replace(self, settings=settings, hosts=hosts, program=program)

    @functools.cached_property  # it reads the script
    def info(self) -> dict[str, Any]:
        return {
            "name": self.experiment.name,
            "dsat": __version__,
            "machine": describe(self.hosts),
            "accelerator": self.machine.accelerator,
            "device": self.machine.device_name,
            "software": ", ".join(self.machine.software),
            "config": str(self.experiment.path),
            "model_dir": str(self.experiment.model_dir),
            "script_digest": digest(self.experiment.model_dir / self.program.script),
        }


@contextlib.contextmanager
def prepare_run(settings: Settings, line: CommandLine | None = None) -> Iterator[Prepared]:
    """Prepare a run; on exit end the first trial and release the hosts."""
    with contextlib.ExitStack() as acquired:
        try:
            ready = _prepare(settings, line, acquired)
        except KeyboardInterrupt:
            if settings.resume and not settings.dry_run:
                _log.info(
                    "interrupted before the search resumed: to resume, run the same command again"
                )
            elif not settings.dry_run:
                _log.info("interrupted before the first trial was measured: start the search again")
            raise
        yield ready


def _prepare(
    settings: Settings, line: CommandLine | None, acquired: contextlib.ExitStack
) -> Prepared:
    began_s = time.monotonic()
    if orphans := leftovers.end_orphans():
        _log.info("ended processes left over from a killed dsat: %s", ", ".join(map(str, orphans)))
    source, first = sources.read(settings), None
    section, settings = _read_section(settings, source)
    engine = settings.engine
    if engine == places.AUTO:
        engine = places.detect(Environment(os.environ, source.program.launch))
        if engine != "local":
            _log.info(
                "using --engine %s, which was detected; --engine local uses only this machine",
                engine,
            )
    _check_before_running(settings, source, engine)
    _check_packages(settings, source)
    # The command runs before the devices are inspected, so that its errors show at once.
    # It runs in a resumed run too, to see how ranks start and what the script sets for `auto`.
    is_recorded = not settings.dry_run and engine == "local" and source.can_run_first()
    usage: dict[str, str] = {}
    if is_recorded and not settings.resume:
        usage = accelerators.variables_of_memory_in_use()  # by other processes than the command
        _log.info("running your command as it is: %s", redacted_command(settings.command))
        first = source.first_run(settings.trial_options(), settings.slots)
        acquired.callback(first.close)
        source = source.complete_from_record(first)
    elif is_recorded or source.unknown:
        source = source.run_to_training(settings.trial_timeout_s, settings.slots)
    if section is None:  # running the command may have revealed one
        section, settings = _read_section(settings, source)
    _check_packages(settings, source)
    defaults = installed_deepspeed.check(source.experiment, source.program)
    with slow.logged(_log, "inspecting the accelerators"):
        place = hosts_of.acquire_hosts(engine, source.program, settings.place_options, usage)
        hosts = acquired.enter_context(place)
    source, hosts, slots = _choose_slots(settings, source, hosts)
    program, experiment, machine = source.program, source.experiment, hosts[0].machine
    plan = plans.make_plan(
        settings,
        experiment,
        slots,
        args=program.args,
        switches=plans.find_script_switches(program, experiment.arg_mappings),
        listed_switches=plans.find_launcher_switches(program),
        defaults=defaults,
        device=machine.device_name if settings.engine in ENGINE_NAMES else "",
        offload_helps=not machine.is_cpu,
        slots_per_host=machine.num_slots if slots > machine.num_slots else 0,
    )
    version = hazards.version_in(", ".join(machine.software))
    is_listed = bool(settings.zero_stages) or "stage" in experiment.choices
    plan = plans.drop_faulty_stages(plan, version, is_listed=is_listed)
    return Prepared(line, settings, experiment, program, hosts, plan, section, first, began_s)


def _check_before_running(settings: Settings, source: Source, engine: str) -> None:
    """Raise UserInputError for mistakes that show without running the command."""
    if settings.search_runner_config is not None:
        raise UserInputError(
            "works only on a Determined cluster, but trials run on this machine",
            where=f"--search-runner-config {settings.search_runner_config}",
            hint="Remove it, or use --engine determined.",
        )
    if engine == "local" and source.program.launch.nodes > 1:
        raise UserInputError(
            f"starts ranks on {source.program.launch.nodes} machines, but trials run on this one",
            where="entrypoint",
            hint="For several machines, use deepspeed --hostfile FILE, or dsat in a Slurm job.",
        )
    plans.check(settings)
    slots = settings.slots or source.program.slots
    if slots is not None:
        check_max_slots(settings, slots)
    is_unknown = source.unknown == sources.PROGRAM
    if not settings.dry_run and (settings.run_dir is not None or not is_unknown):
        run_folders.check(settings, source.experiment.name)
    if is_unknown:
        return
    if settings.slots is not None:
        sources.check_ranks(source.program, settings.slots)
    _check_mappings(settings, source.program)


def _check_mappings(settings: Settings, program: Entrypoint) -> dict[str, str]:
    where = settings.name_of("arg_mappings")
    return script_args.check_mappings(settings.arg_mappings, program.args, where=where)


def apply_section(
    settings: Settings, experiment: Experiment, config_path: str | None
) -> tuple[Section | None, Settings]:
    """Read the `autotuning` section; return it, and the settings with its defaults.

    `config_path` is the path of the DeepSpeed configuration in the user's command, if any.
    """
    where = config_path or experiment.ds_config_name
    section = autotuning_section.read(experiment.ds_config, where=where)
    return (None, settings) if section is None else (section, section.apply(settings))


def _read_section(settings: Settings, source: Source) -> tuple[Section | None, Settings]:
    """Apply the `autotuning` section; raise UserInputError if its folders cannot be written to."""
    section, settings = apply_section(settings, source.experiment, source.program.config_path)
    for folder in (section.results_dir, section.exps_dir) if section is not None else ():
        if folder is not None:
            run_folders.check_can_be_made(folder, "Name another folder in the section.")
    return section, settings


def _check_packages(settings: Settings, source: Source) -> None:
    """Check torch and DeepSpeed if the ranks are known to run in this environment."""
    is_here = source.unknown != sources.PROGRAM and not source.program.interpreter
    if is_here and settings.engine in ENGINE_NAMES and settings.engine != "ray":
        packages.check()


def _choose_slots(
    settings: Settings, source: Source, hosts: Sequence[Host]
) -> tuple[Source, tuple[Host, ...], int]:
    """Return the source with checked argument mappings, the hosts, and the devices of a trial.

    Raises:
        UserInputError: the hosts cannot run such trials, or mappings or the searcher are wrong.
    """
    program, available = source.program, all_slots(hosts, source.program)
    if program.needs_command and len(hosts) > 1:
        raise UserInputError(
            "runs on one machine only, because dsat cannot start its ranks itself: "
            f"{program.needs_command}",
            where="command",
            hint="Use --engine local, or let torchrun or deepspeed start the ranks of a script.",
        )
    if settings.run_full_experiment and program.trial_class and not source.command:
        searcher_of_full_run(source.experiment, "metric", "max_length")
    slots = source.slots_per_trial(settings.slots, available)
    usable = hosts_of.extend_slots(hosts, slots)
    check_max_slots(settings, slots)
    if settings.engine in ENGINE_NAMES:  # other engines may run trials elsewhere
        _check_slots(settings, usable, slots)
    if program.launch.takes_all and slots == available and not hosts[0].machine.left_out:
        program = replace(program, slots=slots)  # the command itself starts as many ranks
    mappings = _check_mappings(settings, program)
    experiment = replace(source.experiment, arg_mappings=mappings)
    return replace(source, experiment=experiment, program=program), usable, slots


def searcher_of_full_run(experiment: Experiment, *keys: str) -> Mapping[str, Any]:
    """Return the experiment's searcher, which sets the length of its training.

    Raises:
        UserInputError: one of `keys` is missing.
    """
    searcher: Mapping[str, Any] = experiment.config.get("searcher") or {}
    absent = [key for key in keys if key not in searcher]
    if absent:
        raise UserInputError(
            f"there is no {absent[0]}",
            where=f"{experiment.path}: searcher",
            hint="--run-full-experiment needs it.",
        )
    return searcher


def check_max_slots(settings: Settings, slots: int, *, where: str | None = None) -> None:
    """Raise UserInputError if a trial needs more devices than may be used at once."""
    if settings.max_slots is not None and settings.max_slots < slots:
        raise UserInputError(
            f"{settings.max_slots} is less than the {slots} devices of one trial",
            where=where or settings.name_of("max_slots"),
        )


def _check_slots(settings: Settings, hosts: Sequence[Host], slots: int) -> None:
    is_given = settings.command or "slots" in settings.given
    where = settings.name_of("slots") if is_given else "resources.slots_per_trial"
    check_slots(hosts, slots, where=where)
    machine = hosts[0].machine
    if settings.slot_memory_bytes is not None and not machine.is_cpu:
        where = settings.name_of("slot_memory_bytes")
        if settings.slot_memory_bytes > machine.memory_bytes:
            raise UserInputError(
                f"is more than a device has: {machine.describe()}",
                where=where,
                hint="Choose a smaller size, or leave it out to use all memory.",
            )
        if machine.accelerator != "cuda":
            raise UserInputError(
                f"cannot be enforced on {machine.accelerator}", where=where, hint="Leave it out."
            )
