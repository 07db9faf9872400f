"""Hugging Face's Trainer and accelerate inside a trial.

When the script makes its `TrainingArguments`, the trial's configuration and batch sizes replace the
script's, which may come from the command line, a file or code. Local trials also disable
evaluation, reports, uploads and saving. Written for transformers 4.46 to 5.23 and accelerate 1.15.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsat.command import accelerate_env, ds_config
from dsat.command.switches import OTHER_BATCH, OTHER_CONFIG, OTHER_PARALLELISM
from dsat.errors import InvalidTrial
from dsat.in_trial import config_injection
from dsat.in_trial.adapters.calls import Call
from dsat.in_trial.adapters.trial import RunningTrial
from dsat.in_trial.agreement import rank_and_size
from dsat.values.trial import Trial

if TYPE_CHECKING:  # imports torch
    from dsat.in_trial.script_switches import ScriptSwitches

NO_CPU_RANKS = (
    "accelerate treats each rank on a CPU as the only one. dsat corrects this, but only in runs "
    "that it starts"
)

NO_DEEPSPEED = (
    "the Trainer does not use DeepSpeed: name a DeepSpeed configuration, for example with "
    "--deepspeed ds.json"
)


@dataclass(frozen=True)
class TrainerSettings:
    """Settings that the Trainer of a trial must use.

    Attributes:
        trial: None if the script itself uses the trial's configuration, as on a cluster.
        config_path: file of the trial's DeepSpeed configuration; None keeps the script's own
            configuration and batch sizes.
        max_steps: optimizer steps that a trial's training loop must allow; None in a full-length
            run.
        batch_in_file: whether a file sets the script's batch sizes; the user gets a changed copy.
        plugins: the script's own configurations of accelerate's plugins so far; None for a plugin
            without one.
    """

    trial: Trial | None
    config_path: Path | None
    switches: ScriptSwitches
    max_steps: int | None = None
    batch_in_file: bool = False
    on_cpu: bool = False
    plugins: list[dict[str, Any] | None] = field(default_factory=list)

    def differs_from(self, config: Any) -> bool:
        """Return whether a configuration of the script lacks a setting of the trial.

        Batch sizes do not count: TrainingArguments or the plugin set them.
        """
        assert self.trial is not None
        overrides = {k: v for k, v in self.trial.overrides.items() if k not in ds_config.BATCH_KEYS}
        content = _read_config(config)
        return not config_injection.agrees(content, overrides, but_for=ds_config.AUTO)


def prepare(trial: RunningTrial, args: Any) -> None:
    """Set the trial's values in `TrainingArguments`, before transformers checks the fields."""
    settings: TrainerSettings = trial.trainer
    if settings.max_steps is not None:
        _keep_short(args, settings.max_steps)
    if not (args.deepspeed or accelerate_env.uses_deepspeed(os.environ)):
        return
    own_config = args.deepspeed or os.environ.get(accelerate_env.CONFIG_FILE)
    config = _read_config(settings.config_path or own_config)
    settings.switches.set_arguments(args, config)
    if settings.config_path is None or settings.trial is None:
        args.max_steps = _scheduled_steps(config) or args.max_steps
        return
    is_set_in_code = bool(args.deepspeed) and settings.differs_from(args.deepspeed)
    if args.deepspeed:
        args.deepspeed = config if isinstance(args.deepspeed, dict) else str(settings.config_path)
    batch = settings.trial.batch
    user_batch = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    if not settings.batch_in_file:
        if user_batch != (batch.micro_batch, batch.gas):
            trial.warn(OTHER_BATCH)
        if is_set_in_code:
            trial.warn(OTHER_CONFIG)
    args.per_device_train_batch_size = batch.micro_batch
    args.gradient_accumulation_steps = batch.gas
    if settings.max_steps is not None:
        args.max_steps = _scheduled_steps(config) or settings.max_steps
    if _share_sequences(args, batch.parallelism.sequence):
        trial.warn(OTHER_PARALLELISM)


def _read_config(source: Any) -> dict[str, Any]:
    """Read a configuration as transformers does, allowing repeated keys; empty if unreadable."""
    if isinstance(source, Mapping):
        return dict(source)
    try:
        return dict(json.loads(Path(source).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _keep_short(args: Any, max_steps: int) -> None:
    """Limit steps; disable reports, uploads, resuming, evaluation at start, incomplete batches."""
    args.max_steps = max_steps
    args.report_to = "none"
    args.dataloader_drop_last = True
    args.resume_from_checkpoint = None
    for switch in ("push_to_hub", "auto_find_batch_size", "eval_on_start"):
        if hasattr(args, switch):
            setattr(args, switch, False)


def _scheduled_steps(config: Mapping[str, Any]) -> int | None:
    """Return the scheduler's number of steps, which the Trainer must use; None if there is none."""
    scheduler = config.get("scheduler") or {}
    total = (scheduler.get("params") or {}).get("total_num_steps")
    return total if isinstance(total, int) else None


def _share_sequences(args: Any, slots: int) -> bool:
    """Set the sequence-parallel size in a `ParallelismConfig`; return whether it has changed."""
    config = getattr(args, "parallelism_config", None)
    if config is None or config.sp_size == slots:  # without a config, environment variables decide
        return False
    groups = rank_and_size()[1] // slots
    args.parallelism_config = replace(
        config, sp_size=slots, sp_backend="deepspeed", dp_shard_size=groups if slots > 1 else 1
    )
    return True


def check_arguments(call: Call) -> Any:
    """Apply the trial's values to `TrainingArguments` and its subclasses."""
    if call.trial.trainer is not None:
        prepare(call.trial, call.owner)
    return call.proceed()


def check_plugin(call: Call) -> Any:
    """Use the trial's configuration in accelerate's DeepSpeed plugin.

    A later plugin keeps its own configuration, which is for another model. Only its accumulation
    steps become the trial's, because accelerate accumulates for all plugins alike.
    """
    importlib.import_module("deepspeed")  # makes this process a rank
    settings, plugin = call.trial.trainer, call.owner
    if settings is None or settings.config_path is None or settings.trial is None:
        return call.proceed()
    hf_config = plugin.hf_ds_config
    user_config = _read_config(hf_config) if isinstance(hf_config, (str, dict)) else None
    settings.plugins.append(user_config)
    if user_config is not None and user_config != settings.plugins[0]:
        total, micro, gas = ds_config.BATCH_KEYS
        if gas in user_config:
            user_config[gas] = settings.trial.batch.gas
            if micro in user_config:  # the global batch size follows
                user_config.pop(total, None)
            plugin.hf_ds_config = user_config
        return call.proceed()
    if hf_config is None or isinstance(hf_config, (str, dict)):  # else the Trainer has prepared it
        config = _read_config(settings.config_path)
        if hf_config is not None and settings.differs_from(hf_config):
            call.trial.warn(OTHER_CONFIG)
        zero = config.setdefault("zero_optimization", {"stage": 0})
        plugin.hf_ds_config = config
        plugin.zero_stage = stage = zero.get("stage", 0)
        plugin.gradient_accumulation_steps = settings.trial.batch.gas
        plugin.zero3_init_flag = stage == 3
        for part in ("optimizer", "param"):
            device = (zero.get(f"offload_{part}") or {}).get("device", "none")
            setattr(plugin, f"offload_{part}_device", device)
    else:
        plugin.zero3_init_flag = hf_config.is_zero3()
    # accelerate refuses its own settings beside a configuration.
    os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    return call.proceed()


def train(call: Call) -> Any:
    """Resume from no checkpoint: a resumed training could end before its first step.

    Raises:
        InvalidTrial: the Trainer does not use DeepSpeed, so no trial could stop it early.
    """
    if not getattr(call.owner, "is_deepspeed_enabled", True):
        raise InvalidTrial(NO_DEEPSPEED)
    return call.replace("resume_from_checkpoint", 0, None).proceed()


def control(call: Call) -> None:
    """Keep the Trainer from saving and evaluating.

    When the Trainer saves a checkpoint, it also deletes older ones (`save_total_limit`).
    """
    name, value = call.args
    call.proceed_with(name, False if name in ("should_save", "should_evaluate") else value)


def prepare_backend(call: Call) -> tuple[Any, Any]:
    """Make accelerate recognise all ranks if DeepSpeed runs on CPU cores.

    accelerate chooses the backend by the device. Without a device, it treats each rank as the
    only one (accelerate/state.py: PartialState._prepare_backend).
    """
    backend, kind = call.proceed()
    kinds = type(kind)  # accelerate's `DistributedType`
    if not accelerate_env.uses_deepspeed(os.environ) or kind != kinds.NO:
        return backend, kind
    importlib.import_module("deepspeed")  # makes this process a rank
    settings = call.trial.trainer
    if settings is None or not settings.on_cpu or rank_and_size()[1] < 2:
        return backend, kind
    call.trial.warn(NO_CPU_RANKS)
    return "gloo", kinds.MULTI_CPU
