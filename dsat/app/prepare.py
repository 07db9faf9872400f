"""From what the user wrote to a plan: everything is read and checked before anything is run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsat import __version__
from dsat.engines.local import LocalEngine, LocalOptions, Machine, find_machine
from dsat.errors import UserInputError
from dsat.inputs import autotuning_section, ds_config, experiment, script_args
from dsat.inputs import entrypoint as entrypoints
from dsat.inputs.autotuning_section import Autotuning
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment
from dsat.inputs.script_args import CHECKPOINTING
from dsat.inputs.settings import (
    DEFAULT_STAGES,
    RUN,
    TUNE,
    EstimateSettings,
    Settings,
    plan_values,
)
from dsat.inputs.value_lists import STAGES
from dsat.memory import anchors
from dsat.space.knobs import KNOB_NAMES
from dsat.space.overrides import GAS
from dsat.space.plan import Plan

_MICRO_BATCH = "train_micro_batch_size_per_gpu"


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before a run begins.

    Attributes:
        words: the command line.
        native: the `autotuning` section, if the command is one of DeepSpeed's autotuner.
    """

    words: list[str]
    chosen: Settings
    experiment: Experiment
    program: Entrypoint
    machine: Machine
    plan: Plan
    native: Autotuning | None = None

    @property
    def info(self) -> dict[str, Any]:
        return {
            "name": self.experiment.name,
            "dsat": __version__,
            "machine": self.machine.describe(),
            "config": str(self.experiment.path),
            "model_dir": str(self.experiment.model_dir),
        }


def prepare(chosen: Settings, words: list[str]) -> list[Prepared]:
    """Reads and checks everything the user gave.

    Returns:
        One run; several only where `autotuning.num_gpus` lists several numbers of slots.

    Raises:
        UserInputError: something of it is wrong.
        EngineError: the machine's accelerators cannot be found.
    """
    if chosen.search_runner_config is not None:
        raise UserInputError(
            "is for a Determined cluster, and trials run on this machine",
            where=f"--search-runner-config {chosen.search_runner_config}",
            hint="Leave it out, or use --engine determined.",
        )
    if chosen.method in (TUNE, RUN):
        return _native(chosen, words)
    if chosen.command:
        user, program, machine, slots = _of_command(chosen)
    else:
        assert chosen.config is not None and chosen.model_dir is not None
        user = experiment.read(chosen.config, chosen.model_dir, chosen.include)
        program = entrypoints.parse(user.entrypoint, user.model_dir)
        check_config_path(user, program)
        if chosen.run_full_experiment and program.trial_class:
            _check_full_length(user)
        slots = chosen.slots or user.slots_per_trial
        check_ranks(program, slots)
        machine = find_machine()
    mappings = script_args.checked(chosen.arg_mappings, program.args, where="--arg-mapping")
    user = replace(user, arg_mappings=mappings)
    _check_slots(chosen, machine, slots)
    plan = _plan(chosen, user, program, machine, slots)
    return [Prepared(words, chosen, user, program, machine, plan)]


def prepare_estimate(chosen: EstimateSettings) -> tuple[Experiment, Entrypoint, Machine]:
    """Reads and checks what is needed to run the script without a trial.

    Raises:
        UserInputError: something of it is wrong.
    """
    machine = find_machine()
    if not chosen.command:
        assert chosen.config is not None and chosen.model_dir is not None
        user = experiment.read(chosen.config, chosen.model_dir, chosen.include)
        program = entrypoints.parse(user.entrypoint, user.model_dir)
        check_config_path(user, program)
        return user, program, machine
    folder = Path.cwd()
    program = entrypoints.parse(chosen.command, folder)
    config = _config_of_command(chosen.ds_config, program, folder)
    user = experiment.of_command(chosen.command, _name(program), folder, config)
    if config is None and not program.trial_class:
        captured = _capture(user, program, machine, 1, anchors.TIMEOUT_S)
        user = experiment.of_dict(chosen.command, user.name, folder, captured)
    return user, program, machine


def _check_full_length(user: Experiment) -> None:
    """Raise UserInputError if Determined's harness could not train a Trial class to its end."""
    searcher = user.config.get("searcher") or {}
    for key, example in (("metric", "metric: loss"), ("max_length", "max_length: {batches: 100}")):
        if key not in searcher:
            raise UserInputError(
                "is missing, and a full-length run of a Trial class needs it",
                where=f"{user.path}: searcher.{key}",
                hint=f"Add one, for example {example}.",
            )


def _of_command(chosen: Settings) -> tuple[Experiment, Entrypoint, Machine, int]:
    """What to tune when it is a command after `--`."""
    folder = Path.cwd()
    program = entrypoints.parse(chosen.command, folder)
    config = _config_of_command(chosen.ds_config, program, folder)
    user = experiment.of_command(chosen.command, _name(program), folder, config)
    machine = find_machine()
    slots = _slots_of_command(chosen.slots, program, machine)
    check_ranks(program, slots)
    _check_slots(chosen, machine, slots)
    if config is None and not program.trial_class:
        captured = _capture(user, program, machine, slots, chosen.trial_timeout_s)
        user = experiment.of_dict(chosen.command, user.name, folder, captured)
    return user, program, machine, slots


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
    user: Experiment, program: Entrypoint, machine: Machine, slots: int, timeout_s: float
) -> dict[str, Any]:
    """What the script itself passes to `deepspeed.initialize`."""
    options = LocalOptions(trial_timeout_s=timeout_s, cold=True)
    folder = Path(tempfile.mkdtemp(prefix="dsat-"))
    engine = LocalEngine(user, program, machine, folder, options, slots_per_trial=slots)
    try:
        config = engine.capture_config()
    finally:
        engine.close()
    shutil.rmtree(folder)  # of a script that failed it holds the log
    return config


def _native(chosen: Settings, words: list[str]) -> list[Prepared]:
    """`tune` and `run`: as the `autotuning` section says."""
    folder = Path.cwd()
    program = entrypoints.parse(chosen.command, folder)
    path = _config_of_command(None, program, folder)
    if path is None:
        raise UserInputError(
            "no DeepSpeed configuration is among the script's arguments",
            where=chosen.method,
            hint="Add --deepspeed_config FILE.json (or --deepspeed FILE.json).",
        )
    where = str(program.config_path)
    user = experiment.of_command(chosen.command, _name(program), folder, path)
    section = autotuning_section.read(user.ds_config, where=where)
    mapped = f"{where}: autotuning.arg_mappings"
    mappings = script_args.checked(section.arg_mappings, program.args, where=mapped)
    user = replace(user, arg_mappings=mappings)
    machine = find_machine()
    _check_slots(chosen, machine, program.slots or 1)
    counts = autotuning_section.slots(
        user.ds_config, where=where, available=program.slots or machine.num_slots
    )
    chosen = _as_the_section_says(chosen, section, user)
    runs = []
    for slots in counts:
        native = section
        if len(counts) > 1:
            results, exps = section.results_dir, section.exps_dir
            below = f"num_gpus_{slots}"
            native = replace(section, results_dir=results / below, exps_dir=exps / below)
        plan = _plan(chosen, user, program, machine, slots)
        plan = _with_smallest_batch(plan, section.min_train_batch_size)
        here = replace(program, slots=slots)
        runs.append(Prepared(words, chosen, user, here, machine, plan, native))
    return runs


def _with_smallest_batch(plan: Plan, min_train_batch_size: int) -> Plan:
    """The plan without micro batches whose global batch would be smaller than asked for."""
    if plan.max_train_batch_size is not None or plan.train_batch_size is not None:
        return plan  # the global batch is filled
    step = plan.own_batch.gas * plan.slots_per_trial
    smallest = max(plan.min_micro_batch, -(-min_train_batch_size // step))
    plan = replace(plan, min_micro_batch=smallest)
    _check_micro_batches(plan)
    return plan


def _as_the_section_says(chosen: Settings, section: Autotuning, user: Experiment) -> Settings:
    options: dict[str, Any] = {"early_stopping": section.early_stopping}
    if section.method == "gridsearch":
        options["num_micro_batches"] = section.num_micro_batches
    zero = user.ds_config.get("zero_optimization") or {}
    # Without a stage all are meant (deepspeed/autotuning/README.md).
    own_stage = (zero["stage"],) if "stage" in zero else STAGES
    stages = tuple(user.choices.get("stage", own_stage))
    largest = section.max_micro_batch
    return replace(
        chosen,
        method=section.method,
        search_options=options,
        metric=section.metric,
        max_trials=section.max_trials + 2,  # and the profile, and the user's own
        zero_stages=stages,
        fix=KNOB_NAMES if section.fast else (),
        start_profile_step=section.start_profile_step,
        end_profile_step=section.end_profile_step,
        max_profile_steps=max(
            chosen.max_profile_steps, section.end_profile_step - section.start_profile_step + 1
        ),
        max_train_batch_size=None if chosen.train_batch_size else section.max_train_batch_size,
        min_micro_batch=section.min_micro_batch,
        max_micro_batch=largest,
    )


def _plan(
    chosen: Settings, user: Experiment, program: Entrypoint, machine: Machine, slots: int
) -> Plan:
    return plan_of(
        chosen,
        user,
        slots,
        args=program.args,
        switches=_switches(program, user.arg_mappings),
        offload_helps=not machine.is_cpu,
    )


def plan_of(
    chosen: Settings,
    user: Experiment,
    slots: int,
    *,
    args: Sequence[str],
    switches: Mapping[str, bool],
    offload_helps: bool,
) -> Plan:
    """What to tune, as the user has it.

    Args:
        slots: of a trial.
        args: of the script, which may hold batch sizes.
        switches, offload_helps: see `Plan`.

    Raises:
        UserInputError: nothing is left to tune.
    """
    base = user.base_config
    sizes = script_args.batch_from_args(base, args, user.arg_mappings)
    own_batch = ds_config.resolve_batch(sizes, slots, where=user.ds_config_name)
    listed = dict(user.choices)
    stages = listed.pop("stage", DEFAULT_STAGES)
    micro_batches = tuple(sorted(listed.pop(_MICRO_BATCH, ())))
    if chosen.train_batch_size is not None or chosen.max_train_batch_size is not None:
        listed.pop(GAS, None)
    decided = plan_values(chosen)
    decided["zero_stages"] = tuple(chosen.zero_stages or stages)
    decided["nvme_path"] = chosen.nvme_path or _nvme_path(base)
    plan = Plan(
        **decided,
        method=chosen.method,
        max_trials=chosen.max_trials,
        finals=chosen.finals,
        indifference=chosen.indifference,
        slots_per_trial=slots,
        base_config=base,
        own_batch=own_batch,
        search_options=chosen.search_options,
        micro_batches=micro_batches,
        choices=listed,
        switches=switches,
        offload_helps=offload_helps,
        measured={
            # A digest, because an entrypoint or a hyperparameter may be a credential.
            "program": ds_config.fingerprint(
                {
                    "entrypoint": user.entrypoint,
                    "hparams": _other_hparams(user),
                    "arg_mappings": dict(user.arg_mappings),
                }
            ),
            "steps": [chosen.start_profile_step, chosen.end_profile_step, chosen.max_profile_steps],
        },
    )
    _check_micro_batches(plan)
    return plan


def _other_hparams(user: Experiment) -> dict[str, Any]:
    """The hyperparameters but for the DeepSpeed configuration, which is in the plan by itself."""
    inline = not isinstance(user.hparams[ds_config.CONFIG_KEY], str)
    left_out = {ds_config.OVERWRITE_KEY, *([ds_config.CONFIG_KEY] if inline else [])}
    return {name: value for name, value in user.hparams.items() if name not in left_out}


def _check_micro_batches(plan: Plan) -> None:
    if plan.allowed_micro_batches:
        return
    if plan.train_batch_size is not None and not plan.micro_batches:
        raise UserInputError(
            f"{plan.train_batch_size} cannot be reached with {plan.slots_per_trial} slots and "
            f"micro batches that are multiples of {plan.divisible_by}",
            where="--train-batch-size",
            hint=f"Choose a multiple of {plan.slots_per_trial * plan.divisible_by}.",
        )
    raise UserInputError(
        "no micro batch is left to try: what you listed, --divisible-by, the smallest and largest "
        f"micro batch and the global batch exclude each other on {plan.slots_per_trial} slots",
        where=_MICRO_BATCH,
    )


def _switches(program: Entrypoint, given: Mapping[str, str]) -> dict[str, bool]:
    """The script's own switches that can be searched, and how the user has them."""
    flag = script_args.mappings_for(program.args, given).get(CHECKPOINTING)
    if flag is None:
        return {}
    return {CHECKPOINTING: script_args.is_on(program.args, flag)}


def _nvme_path(config: Mapping[str, Any]) -> str | None:
    zero = config.get("zero_optimization") or {}
    for section in ("offload_optimizer", "offload_param"):
        given = zero.get(section)
        if isinstance(given, Mapping) and given.get("nvme_path"):
            return str(given["nvme_path"])
    return None


def _name(program: Entrypoint) -> str:
    if program.script:
        return Path(program.script).stem
    return program.module or program.trial_class


def _slots_of_command(given: int | None, program: Entrypoint, machine: Machine) -> int:
    return given or program.slots or (machine.num_slots if program.takes_all_slots else 1)


def check_ranks(program: Entrypoint, slots: int) -> None:
    if program.slots not in (None, slots):
        raise UserInputError(
            f"starts {program.slots} ranks, but a trial has {slots} slots",
            where="entrypoint",
            hint="Make resources.slots_per_trial (or --slots) and the entrypoint agree.",
        )


def check_config_path(user: Experiment, program: Entrypoint) -> None:
    given, known = program.config_path, user.hparams[ds_config.CONFIG_KEY]
    if given is None or not isinstance(known, str):
        return
    if os.path.normpath(given) != os.path.normpath(known):
        raise UserInputError(
            f"names the DeepSpeed configuration {given!r}, but hyperparameters."
            f"{ds_config.CONFIG_KEY} is {known!r}",
            where=f"{user.path}: entrypoint",
            hint="Make both the same.",
        )


def check_max_slots(chosen: Settings, slots: int) -> None:
    """Raise UserInputError if a trial needs more slots than may be used at once."""
    if chosen.max_slots is not None and chosen.max_slots < slots:
        raise UserInputError(
            f"{chosen.max_slots} is less than the {slots} slots of one trial", where="--max-slots"
        )


def _check_slots(chosen: Settings, machine: Machine, slots: int) -> None:
    if slots > machine.num_slots:
        raise UserInputError(
            f"a trial needs {slots} slots, and this machine has {machine.describe()}",
            where="--slots" if chosen.command else "resources.slots_per_trial",
            hint=f"Use --slots {machine.num_slots} or another machine.",
        )
    check_max_slots(chosen, slots)
    if chosen.slot_memory_bytes is not None and not machine.is_cpu:
        if chosen.slot_memory_bytes > machine.memory_bytes:
            raise UserInputError(
                f"is more than a slot has: {machine.describe()}", where="--slot-memory"
            )
        if machine.accelerator != "cuda":
            raise UserInputError(
                f"cannot be enforced on {machine.accelerator}", where="--slot-memory"
            )
