"""Make and check the plan of a search from its settings and the experiment."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dsat.command import ds_config, script_args
from dsat.command.entrypoint import Entrypoint
from dsat.command.experiment import Experiment
from dsat.command.switches import BIND_CORES, CHECKPOINTING, SWITCHES, VARIABLE
from dsat.errors import UserInputError
from dsat.options import ANY, OWN
from dsat.run.free_batch import is_batch_minimal
from dsat.run.strategies import make_space
from dsat.run.training_check import training_with
from dsat.search import SEARCHES
from dsat.space.batch_rule import BatchRule
from dsat.space.deepspeed_settings import PARALLELISM, SETTING_NAMES, SETTINGS
from dsat.space.overrides import GAS
from dsat.space.plan import LONGEST_S, Plan
from dsat.tuning.settings import ALL, Settings
from dsat.values import hazards, parallelism
from dsat.values.objective import METRICS, Objective
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import read_strategy

_log = logging.getLogger(__name__)
_MICRO_BATCH = "train_micro_batch_size_per_gpu"
_NVME_PATHS = [f"zero_optimization.offload_{what}.nvme_path" for what in ("optimizer", "param")]


def make_plan(
    settings: Settings,
    experiment: Experiment,
    slots: int,
    *,
    args: Sequence[str],
    device: str = "",
    **known: Any,
) -> Plan:
    """Make the plan of a search.

    Args:
        slots, device: number of devices of a trial, and their name; empty if unknown.
        args: arguments of the script, which may contain batch sizes.
        known: fields of `Plan` that hosts, script and DeepSpeed decide: `switches`,
            `listed_switches`, `offload_helps`, `slots_per_host` and `defaults`.
    """
    _check_metric(settings)
    base = experiment.base_config
    sizes = script_args.batch_from_args(base, args, experiment.arg_mappings, experiment.hparams)
    own_batch = ds_config.resolve_batch(sizes, slots, where=experiment.ds_config_name)
    listed = dict(experiment.choices)
    stages = listed.pop("stage", ds_config.STAGES)
    micro_batches = tuple(sorted(listed.pop(_MICRO_BATCH, ())))
    global_batch = _global_batch(settings, base, own_batch, is_listed=GAS in listed)
    any_batch = global_batch is None and settings.max_train_batch_size is None
    if not any_batch:
        listed.pop(GAS, None)
    decided = {**_values(settings, Plan), "train_batch_size": global_batch}
    decided["tune"], decided["fix"] = _expand_names(settings, known.get("defaults", {}))
    launcher_switches = known.pop("listed_switches", {})
    decided["listed_switches"] = {**launcher_switches, **_listed_switches(settings, args)}
    decided["zero_stages"] = tuple(settings.zero_stages or stages)
    paths = (ds_config.at(base, path) for path in _NVME_PATHS)
    decided["nvme_path"] = settings.nvme_path or next(filter(None, paths), None)
    # A time per optimizer step grows with the batch, unless the global batch is given.
    is_time = Objective(settings.metric).smaller_is_better
    like_ancestor = settings.search_options.get("search_range_factor") is not None
    plan = Plan(
        **decided,
        longest_s=LONGEST_S,
        ramp=SEARCHES[settings.method].ramps and not like_ancestor and not (any_batch and is_time),
        slots_per_trial=slots,
        data_parallel=_data_parallel(base, slots, global_batch, tuned=decided["tune"]),
        base_config=base,
        own_batch=own_batch,
        micro_batches=micro_batches,
        choices=listed,
        measured=_measured(settings, experiment, device),
        **known,
    )
    check_micro_batches(plan)
    return plan


def drop_faulty_stages(plan: Plan, version: str | None, *, is_listed: bool) -> Plan:
    """Exclude stages that this version of DeepSpeed refuses or trains wrongly; log warnings.

    The stage of the user's configuration stays; if the user listed stages (`is_listed`), all stay.
    """
    config, gas = plan.config({}), plan.own_batch.gas
    user_faults = hazards.find(version, training_with(config, gas, plan), *hazards.KINDS)
    shown_version = version or ""
    for fault in user_faults:
        verb = "may have" if fault.unseen else "has"
        _log.warning("your configuration %s a known fault: %s", verb, fault.describe(shown_version))
    stage = read_strategy(config).stage
    accumulates = gas if plan.train_batch_size is None else max(gas, 2)
    faulty = []
    for other in plan.zero_stages:
        zero = {**(config.get("zero_optimization") or {}), "stage": other}
        training = training_with({**config, "zero_optimization": zero}, accumulates, plan)
        faults = hazards.find(version, training, hazards.GRADIENTS, hazards.FAILS)
        reasons = [fault.describe(shown_version) for fault in faults if not fault.unseen]
        if other < ds_config.least_stage(config, version):
            reasons.append("DeepSpeed refuses it with your types of gradients or optimizer states")
        if reasons and other != stage and not is_listed:
            _log.warning("stage %d is not searched: %s", other, reasons[0])
            faulty.append(other)
    return dataclasses.replace(plan, faulty_stages=tuple(faulty))


def check(settings: Settings) -> None:
    """Raise UserInputError for settings that are wrong for every script and device."""
    _expand_names(settings, {})
    _check_metric(settings)
    size = settings.train_batch_size
    values = _values(settings, BatchRule)
    values["train_batch_size"] = size if isinstance(size, int) else None
    check_micro_batches(BatchRule(**values, slots_per_trial=1, own_batch=BatchTriple(1, 1, 1)))


def _values(settings: Settings, kind: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(settings).items() if name in names}


def _global_batch(
    settings: Settings, base: Mapping[str, Any], batch: BatchTriple, *, is_listed: bool
) -> int | None:
    """Return the global batch size of all configurations; None if it is free.

    Args:
        is_listed: whether the user lists accumulation steps, which change the global batch.

    Raises:
        UserInputError: the user sets the batch or lists accumulation, but the script controls it.
    """
    size = settings.train_batch_size
    is_asked = "train_batch_size" in settings.given
    if base.get("managed_gradient_accumulation") is False:
        is_requested = is_asked and size != ANY
        if is_listed or is_requested or settings.max_train_batch_size is not None:
            raise UserInputError(
                "leaves gradient accumulation to the script, so dsat cannot set a global batch",
                where="managed_gradient_accumulation: false",
                hint="Remove the global batch size and the list of accumulation steps.",
            )
        return None
    if isinstance(size, int):
        return size
    if size == OWN and not is_asked and is_listed:
        return None
    is_in_config = isinstance(base.get(ds_config.BATCH_KEYS[0]), int) and not is_listed
    held = is_in_config and size is None and settings.max_train_batch_size is None
    return batch.train_batch_size if held or size == OWN else None


def _data_parallel(
    base: Mapping[str, Any], slots: int, global_batch: int | None, *, tuned: Collection[str]
) -> int:
    """Return `BatchRule.data_parallel`, the largest data-parallel size of a trial.

    If parallelism is searched, the largest data-parallel size must divide a fixed global batch.
    """
    largest = parallelism.read_parallelism(base).data(slots)
    if any(key in tuned for key in PARALLELISM):
        largest = math.gcd(slots, global_batch or slots)
    return largest if largest < slots else 0


def _measured(settings: Settings, experiment: Experiment, device: str) -> dict[str, Any]:
    """Return the program, measured steps and device, which must stay the same on resuming."""
    excluded = [ds_config.OVERWRITE_KEY]
    if not isinstance(experiment.hparams[ds_config.CONFIG_KEY], str):  # an inline configuration
        excluded.append(ds_config.CONFIG_KEY)
    program = {
        "entrypoint": experiment.entrypoint,
        "hparams": {k: value for k, value in experiment.hparams.items() if k not in excluded},
        "arg_mappings": dict(experiment.arg_mappings),
    }
    steps = [settings.start_profile_step, settings.end_profile_step, settings.max_profile_steps]
    # The program is a digest, because an entrypoint or a hyperparameter may contain a credential.
    named_device = {"device": device} if device else {}
    return {"program": ds_config.fingerprint(program), "steps": steps, **named_device}


def _check_metric(settings: Settings) -> None:
    """Raise UserInputError for a metric that the method or a searched switch does not support."""
    if SEARCHES[settings.method].needs_time and not METRICS[settings.metric].of_time:
        raise UserInputError(
            f"{settings.method} predicts only times and rates, but {settings.metric} is neither",
            where=settings.name_of("metric"),
            hint="Use another method, such as random.",
        )
    for name in (*settings.listed_switches, *settings.tune):
        metric = SWITCHES[name].metric if name in SWITCHES else ""
        if metric not in ("", settings.metric):
            raise UserInputError(
                f"{name} changes the tokens per sample, so trials can only be compared by {metric}",
                where=settings.name_of("metric"),
                hint=f"Use --metric {metric}.",
            )


def _listed_switches(settings: Settings, args: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return the values to try by switch: switches of `--vary`, and variables in `--search`.

    The first value is the current one; None if it is unknown.
    """
    switches = {n: (None, *SWITCHES[n].values) for n in settings.tune if n.startswith(VARIABLE)}
    for name, values in settings.listed_switches.items():
        value: Any = None
        if name.startswith("--"):
            is_bare = values == (False, True)
            value = (script_args.is_on if is_bare else script_args.value_of)(args, name)
        switches[name] = tuple(dict.fromkeys((value, *values)))
    return switches


def find_launcher_switches(program: Entrypoint) -> dict[str, tuple[Any, ...]]:
    """Return switches of DeepSpeed's launcher that the command leaves off, with their values."""
    launch = program.launch
    is_free = launch.passes_local_rank and not (launch.binds_cores or program.needs_command)
    return {BIND_CORES: (False, True)} if is_free else {}


def _expand_names(
    settings: Settings, defaults: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the settings of `--search` and `--keep`, with `all` expanded; check both."""
    unsupported = {k.key for k in SETTINGS if defaults and k.path not in defaults}
    absent = sorted(unsupported & set(settings.tune))
    if absent and set(settings.tune) != set(SETTING_NAMES):
        raise UserInputError(
            f"the installed DeepSpeed has no {', '.join(absent)}",
            where=settings.name_of("tune"),
            hint="Leave it out, or install a newer DeepSpeed.",
        )
    # Parallelism needs a script that is written for it.
    everything = tuple(name for name in SETTING_NAMES if name not in PARALLELISM)
    tune = everything if ALL in settings.tune else settings.tune
    fix = settings.fix
    if ALL in fix:  # all except those that --search names
        fix = tuple(name for name in SETTING_NAMES if name not in settings.tune)
    in_both = sorted(set(tune) & set(fix))
    if in_both:
        raise UserInputError(
            f"{', '.join(in_both)} cannot be given to both {settings.name_of('tune')} and "
            f"{settings.name_of('fix')}"
        )
    return tune, fix


def check_micro_batches(rule: BatchRule) -> None:
    """Raise UserInputError if no micro batch is left to try."""
    if rule.allowed_micro_batches:
        return
    if rule.train_batch_size is not None and not rule.micro_batches:
        times_devices = " times the devices" if rule.slots_per_trial == 1 else ""
        raise UserInputError(
            f"{rule.train_batch_size} cannot be reached with {_groups(rule)} and the micro batches "
            "that --divisible-by, --min-micro-batch and --max-micro-batch allow",
            where="--train-batch-size",
            hint=f"Choose a multiple of {rule.most_groups * rule.divisible_by}{times_devices}.",
        )
    raise UserInputError(
        f"no micro batch is left to try on {_groups(rule)}: none satisfies your list of values, "
        "--divisible-by, --min-micro-batch, --max-micro-batch and the global batch together",
        where=_MICRO_BATCH,
        hint="Remove one of these limits.",
    )


def _groups(rule: BatchRule) -> str:
    if rule.data_parallel:
        return f"a data-parallel size of {rule.data_parallel}"
    return (
        "any number of devices" if rule.slots_per_trial == 1 else f"{rule.slots_per_trial} devices"
    )


def find_script_switches(program: Entrypoint, arg_mappings: Mapping[str, str]) -> dict[str, bool]:
    """Return the user's value of activation checkpointing, by name; empty if no flag sets it."""
    flag = script_args.mappings_for(program.args, arg_mappings).get(CHECKPOINTING)
    if flag is None:
        return {}
    return {CHECKPOINTING: script_args.is_on(program.args, flag)}


def make_notes(settings: Settings, plan: Plan) -> Iterator[str]:
    """Yield notes on consequences of a plan that may surprise the user."""
    size = plan.train_batch_size
    if size is not None and "train_batch_size" not in settings.given:
        note = (
            f"the search keeps your global batch of {size}. --train-batch-size any also searches "
            "other global batches, which change the training"
        )
        if is_batch_minimal(plan):
            note = (
                f"your global batch of {size} is one sample per device, so the micro batch cannot "
                "grow. --train-batch-size any also searches larger batches, which change the "
                "training"
            )
        yield note
    searched = {key for branch in make_space(plan).branches for key, _ in branch.searched}
    fixed = {setting.key for setting in SETTINGS} - searched
    if names := [name for name in settings.tune if name in fixed]:
        yield (
            f"{', '.join(names)} cannot be searched: your configuration, its precision or this "
            "machine allows only one value"
        )
