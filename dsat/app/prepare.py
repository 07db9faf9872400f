"""From what the user wrote to a plan: everything is read and checked before anything is run."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsat import __version__
from dsat.app import autotuning, plans
from dsat.app import source as sources
from dsat.app.hosts import Hosts, all_slots, check_slots, describe, find_hosts
from dsat.app.installed_deepspeed import InstalledDeepSpeed
from dsat.app.source import Source
from dsat.engines import places
from dsat.engines.local import Host, Machine
from dsat.engines.local.first_run import FirstRun
from dsat.engines.places import ENGINE_NAMES
from dsat.errors import UserInputError
from dsat.inputs import script_args
from dsat.inputs.autotuning_section import Autotuning
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment
from dsat.inputs.settings import RUN, TUNE, Settings
from dsat.space.plan import Plan
from dsat.values import slow
from dsat.values.text import words_without_secrets

_log = logging.getLogger(__name__)
_LONGEST_SHOWN = 200


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before a run begins.

    Attributes:
        argv: the command line; None if it was no command line that asked for it.
        found: the hosts where trials run.
        native: the `autotuning` section, if the command is one of DeepSpeed's autotuner.
        first: the user's own command, which runs already and is the first trial.
    """

    argv: Sequence[str] | None
    settings: Settings
    experiment: Experiment
    program: Entrypoint
    found: Hosts
    plan: Plan
    native: Autotuning | None = None
    first: FirstRun | None = None

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Hosts of the run."""
        return self.found.hosts

    @property
    def machine(self) -> Machine:
        """Any of the hosts', which are equal."""
        return self.hosts[0].machine

    @property
    def num_slots(self) -> int:
        """Number of slots of these hosts."""
        return self.machine.num_slots * len(self.hosts)

    @property
    def info(self) -> dict[str, Any]:
        return {
            "name": self.experiment.name,
            "dsat": __version__,
            "machine": describe(self.hosts),
            "config": str(self.experiment.path),
            "model_dir": str(self.experiment.model_dir),
        }


@contextlib.contextmanager
def prepared(settings: Settings, argv: Sequence[str] | None = None) -> Iterator[list[Prepared]]:
    """Prepare runs; end the first run and release the hosts afterwards."""
    runs = prepare(settings, argv)
    try:
        yield runs
    finally:
        for ready in runs:
            if ready.first is not None:
                ready.first.close()
            ready.found.release()


def prepare(settings: Settings, argv: Sequence[str] | None = None) -> list[Prepared]:
    """Reads and checks everything the user gave.

    Args:
        argv: the command line, if there was one.

    Returns:
        One run; several only where `autotuning.num_gpus` lists several numbers of slots.

    Raises:
        UserInputError: something of it is wrong.
        EngineError: the machine's accelerators cannot be found.
    """
    if settings.search_runner_config is not None:
        raise UserInputError(
            "is for a Determined cluster, and trials run on this machine",
            where=f"--search-runner-config {settings.search_runner_config}",
            hint="Leave it out, or use --engine determined.",
        )
    source = sources.read(settings)
    _check_before_running(settings, source)
    first = None
    if _may_run_first(settings, source):
        _log.info("running your command as it is: %s", _shown(settings.command))
        first = source.first_run(settings.trial_options(1), settings.slots)
    try:
        with InstalledDeepSpeed() as deepspeed:
            if source.config_known and first is None:
                deepspeed.begin(source.experiment, source.program)
            return _prepared(settings, argv, source, deepspeed, first)
    except BaseException:
        if first is not None:
            first.close()
        raise


def _check_before_running(settings: Settings, source: Source) -> None:
    """Raise UserInputError for what is wrong whatever a run of the command shows."""
    if not source.start_known:
        return
    if settings.method in (TUNE, RUN):
        if not source.config_known:
            autotuning.read(source, settings.method)
        return
    if settings.slots is not None:
        sources.check_ranks(source.program, settings.slots)
    script_args.checked(settings.arg_mappings, source.program.args, where="--arg-mapping")


def _shown(command: Sequence[str]) -> str:
    """The beginning of a command, on one line."""
    return " ".join(shlex.join(words_without_secrets(command)).split())[:_LONGEST_SHOWN]


def _may_run_first(settings: Settings, source: Source) -> bool:
    """Decide whether the first trial is the command itself, on this machine."""
    is_new = not (settings.dry_run or settings.resume)
    if not is_new or settings.method in (TUNE, RUN) or not source.can_run_first():
        return False
    here = places.AUTO if settings.engine == places.AUTO else "local"
    if here == places.AUTO:
        here = places.detect(places.Environment(os.environ))
    return here == "local" and settings.engine in (places.AUTO, "local")


def _prepared(
    settings: Settings,
    argv: Sequence[str] | None,
    source: Source,
    deepspeed: InstalledDeepSpeed,
    first: FirstRun | None,
) -> list[Prepared]:
    was_known = source.config_known
    # Before the devices are looked at: what is wrong with the command is shown at once.
    if first is not None:
        source = source.as_recorded(first)
    else:
        source = source.with_known_start(settings.trial_timeout_s, settings.slots)
    with slow.told(_log, "looking at the accelerators"):
        found = find_hosts(settings.engine, source.program, settings.place_options)
    try:
        runs = _prepared_on(found, settings, argv, source, deepspeed, was_known=was_known)
        return [replace(ready, first=first) for ready in runs]
    except BaseException:
        found.release()
        raise


def _prepared_on(
    found: Hosts,
    settings: Settings,
    argv: Sequence[str] | None,
    source: Source,
    deepspeed: InstalledDeepSpeed,
    *,
    was_known: bool,
) -> list[Prepared]:
    found = found.only(source.program.devices, source.program.not_devices)
    hosts, machine = found.hosts, found.hosts[0].machine
    if was_known:
        deepspeed.check(source.experiment, source.program)
    if source.program.needs_command and len(hosts) > 1:
        raise UserInputError(
            "runs on one machine only: its ranks cannot be started by themselves, because "
            f"{source.program.needs_command}",
            where="command",
            hint="Use --engine local, or let torchrun or deepspeed start the ranks of a script.",
        )
    section = None
    if settings.method in (TUNE, RUN):
        section = autotuning.read(source, settings.method)
        _check_slots(settings, hosts, source.program.slots or 1)
        mappings = autotuning.arg_mappings(source, section)
        counts = autotuning.slot_counts(source, all_slots(hosts, source.program))
        settings = autotuning.settings_of(settings, section, source.experiment)
    else:
        if settings.run_full_experiment and source.program.trial_class and not source.is_command:
            _check_full_length(source.experiment)
        counts = [source.slots_per_trial(settings.slots, all_slots(hosts, source.program))]
        _check_slots(settings, hosts, counts[0])
        given, args = settings.arg_mappings, source.program.args
        mappings = script_args.checked(given, args, where="--arg-mapping")
    source = replace(source, experiment=replace(source.experiment, arg_mappings=mappings))
    if not was_known:
        deepspeed.check(source.experiment, source.program)
    runs = []
    for slots in counts:
        program, native = source.program, section
        plan = plans.plan_of(
            settings,
            source.experiment,
            slots,
            args=program.args,
            switches=plans.switches_of(program, mappings),
            offload_helps=not machine.is_cpu,
            slots_per_host=machine.num_slots if slots > machine.num_slots else 0,
            defaults=deepspeed.knob_defaults(source.program),
        )
        if section is not None:
            program = replace(program, slots=slots)
            plan = autotuning.with_smallest_batch(plan, section.min_train_batch_size)
            if len(counts) > 1:
                native = autotuning.below(section, f"num_gpus_{slots}")
        runs.append(Prepared(argv, settings, source.experiment, program, found, plan, native))
    return runs


def _check_full_length(experiment: Experiment) -> None:
    """Raise UserInputError if Determined's harness could not train a Trial class to its end."""
    searcher = experiment.config.get("searcher") or {}
    for key, example in (("metric", "metric: loss"), ("max_length", "max_length: {batches: 100}")):
        if key not in searcher:
            raise UserInputError(
                "is missing, and a full-length run of a Trial class needs it",
                where=f"{experiment.path}: searcher.{key}",
                hint=f"Add one, for example {example}.",
            )


def check_max_slots(settings: Settings, slots: int) -> None:
    """Raise UserInputError if a trial needs more slots than may be used at once."""
    if settings.max_slots is not None and settings.max_slots < slots:
        raise UserInputError(
            f"{settings.max_slots} is less than the {slots} slots of one trial", where="--max-slots"
        )


def _check_slots(settings: Settings, hosts: Sequence[Host], slots: int) -> None:
    check_max_slots(settings, slots)
    if settings.engine not in ENGINE_NAMES:
        return  # trials do not run on this machine
    where = "--slots" if settings.command else "resources.slots_per_trial"
    check_slots(hosts, slots, where=where)
    machine = hosts[0].machine
    if settings.slot_memory_bytes is not None and not machine.is_cpu:
        if settings.slot_memory_bytes > machine.memory_bytes:
            raise UserInputError(
                f"is more than a slot has: {machine.describe()}", where="--slot-memory"
            )
        if machine.accelerator != "cuda":
            raise UserInputError(
                f"cannot be enforced on {machine.accelerator}", where="--slot-memory"
            )
