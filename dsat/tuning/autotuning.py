"""Settings of `dsat tune` and `dsat run`, from the `autotuning` section."""

from __future__ import annotations

from dataclasses import replace

from dsat.command.ds_config import STAGES
from dsat.command.experiment import Experiment
from dsat.command.switches import SWITCHES
from dsat.errors import UserInputError
from dsat.options import ANY
from dsat.prepare.source import Source
from dsat.search import usual_options
from dsat.space.knobs import KNOB_NAMES
from dsat.space.plan import Plan
from dsat.tuning import autotuning_section
from dsat.tuning.autotuning_section import Autotuning
from dsat.tuning.plans import check_micro_batches
from dsat.tuning.settings import Settings


def read(source: Source, method: str) -> Autotuning:
    """Read the section of the configuration that the script's arguments name.

    Raises:
        UserInputError: they name none, or something of the section is wrong.
    """
    if source.program.config_path is None:
        raise UserInputError(
            "no DeepSpeed configuration is among the script's arguments",
            where=method,
            hint="Add --deepspeed_config FILE.json (or --deepspeed FILE.json).",
        )
    return autotuning_section.read(source.experiment.ds_config, where=source.program.config_path)


def settings_of(settings: Settings, section: Autotuning, experiment: Experiment) -> Settings:
    """Return the settings of the search that a section asks for."""
    options = usual_options(section.method)
    options["early_stopping"] = section.early_stopping or None
    if section.method == "gridsearch":
        options["num_micro_batches"] = section.num_micro_batches
    zero = experiment.ds_config.get("zero_optimization") or {}
    # Without a stage all are meant (deepspeed/autotuning/README.md).
    own_stage = (zero["stage"],) if "stage" in zero else STAGES
    stages = tuple(experiment.choices.get("stage", own_stage))
    return replace(
        settings,
        method=section.method,
        search_options=options,
        metric=section.metric,
        max_trials=section.max_trials + 2,  # and the user's own, and a profile if it fails
        zero_stages=stages,
        fix=KNOB_NAMES if section.fast else (),
        start_profile_step=section.start_profile_step,
        end_profile_step=section.end_profile_step,
        max_profile_steps=max(
            settings.max_profile_steps, section.end_profile_step - section.start_profile_step + 1
        ),
        # As DeepSpeed's autotuner, which replaces what the configuration gives.
        train_batch_size=settings.train_batch_size or ANY,
        max_train_batch_size=(section.max_train_batch_size or None)
        if settings.train_batch_size in (None, ANY)
        else None,
        min_micro_batch=section.min_micro_batch,
        max_micro_batch=section.max_micro_batch,
    )


def adapted(plan: Plan, section: Autotuning) -> Plan:
    """Return a plan within the bounds of a section.

    It has no switches of the script that no argument shows, since the results of DeepSpeed's
    autotuner are a configuration and the arguments, and no micro batches whose global batch would
    be too small.
    """
    found = (name for name in SWITCHES if name not in plan.switches)
    plan = replace(plan, fix=tuple(dict.fromkeys((*plan.fix, *found))))
    if plan.max_train_batch_size is not None or plan.train_batch_size is not None:
        return plan  # the global batch is filled
    step = plan.own_batch.gas * plan.most_groups
    smallest = max(plan.min_micro_batch, -(-section.min_train_batch_size // step))
    plan = replace(plan, min_micro_batch=smallest)
    check_micro_batches(plan)
    return plan
