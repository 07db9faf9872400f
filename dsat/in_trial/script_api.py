"""Functions for training scripts. Importing this module imports neither torch nor DeepSpeed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsat.command import ds_config, script_args
from dsat.command.ds_config import (
    AUTO,
    CONFIG_KEY,
    DSAT_SWITCHES_KEY,
    DSAT_TRIAL_KEY,
    OVERWRITE_KEY,
    whole_number,
)
from dsat.errors import UserInputError
from dsat.in_trial.hook import TRIAL_VARIABLE
from dsat.values.files import write_atomically

if TYPE_CHECKING:
    from dsat.in_trial.cluster_rank import Task

_MICRO_BATCH, _GAS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_HF_CONFIG_FLAG = "--deepspeed"


def get_ds_config_from_hparams(
    hparams: Mapping[str, Any], base_dir: str | os.PathLike[str] = "."
) -> dict[str, Any]:
    """Return the DeepSpeed configuration of this trial, for `deepspeed.initialize(config=...)`.

    It is the file `hparams["deepspeed_config"]`, changed by `hparams["overwrite_deepspeed_args"]`:
    dicts are merged key by key, anything else is replaced. The section `autotuning` is left out,
    because with it DeepSpeed would end the script early. Drop-in for
    `determined.pytorch.dsat.get_ds_config_from_hparams`.

    Args:
        hparams: the trial's hyperparameters. `deepspeed_config` may also be the configuration
            itself, as a dict.
        base_dir: the folder that the path of the configuration is relative to.

    Raises:
        UserInputError: there is no `deepspeed_config`, it cannot be read, or the
            overrides are not a mapping.
    """
    if CONFIG_KEY not in hparams:
        raise UserInputError(
            f"the hyperparameters have no {CONFIG_KEY!r}, only {sorted(hparams)}",
            where="get_ds_config_from_hparams",
            hint="Add it to `hyperparameters` in the experiment configuration.",
        )
    _attach(hparams)
    base = hparams[CONFIG_KEY]
    if not isinstance(base, (str, os.PathLike, Mapping)):
        raise UserInputError(f"must be a path or a mapping, not {base!r}", where=CONFIG_KEY)
    if not isinstance(base, Mapping):
        base = ds_config.read(Path(base_dir) / base)
    return ds_config.prepare_for_training(base, _overrides(hparams))


def _overrides(hparams: Mapping[str, Any]) -> Mapping[str, Any]:
    overrides = hparams.get(OVERWRITE_KEY) or {}
    if not isinstance(overrides, Mapping):
        raise UserInputError(f"must be a mapping, not {overrides!r}", where=OVERWRITE_KEY)
    return overrides


def get_batch_config_from_mbs_gas_and_slots(
    ds_config: Mapping[str, Any], slots: int
) -> dict[str, int]:
    """Return DeepSpeed's three batch sizes, from a configuration and the number of slots.

    Drop-in for `determined.pytorch.dsat.get_batch_config_from_mbs_gas_and_slots`.

    Args:
        ds_config: configuration with `train_micro_batch_size_per_gpu`;
            `gradient_accumulation_steps` count as 1 if they are absent or "auto".
        slots: number of devices of a trial.

    Raises:
        UserInputError: a size is not a positive integer.
    """
    micro_batch = whole_number(ds_config.get(_MICRO_BATCH), _MICRO_BATCH)
    gas = ds_config.get(_GAS, 1)
    gas = 1 if gas == AUTO else whole_number(gas, _GAS)
    train_batch = micro_batch * gas * whole_number(slots, "slots")
    return {"train_batch_size": train_batch, _MICRO_BATCH: micro_batch, _GAS: gas}


def get_hf_args_with_overwrites(args: Sequence[str], hparams: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments with which a Hugging Face Trainer runs this trial.

    `--deepspeed` names a copy of its file into which `hparams["overwrite_deepspeed_args"]` is
    merged; batch-size flags agree with the copy, and are added if absent. Without overrides the
    arguments do not change. Drop-in for `determined.pytorch.dsat.get_hf_args_with_overwrites`,
    which changes the user's own file instead.

    Args:
        args: arguments for `HfArgumentParser`, as in `sys.argv[1:]`.
        hparams: the trial's hyperparameters.

    Raises:
        UserInputError: the overrides are not a mapping; or there are overrides, but the arguments
            name no DeepSpeed configuration, or it cannot be read.
    """
    if _attach(hparams) is not None:
        script_args.check_flags(args, json.loads(hparams[DSAT_TRIAL_KEY]["flags"]))
    overrides = _overrides(hparams)
    if not overrides:
        return list(args)
    path = script_args.value_of(args, _HF_CONFIG_FLAG)
    if not path:
        raise UserInputError(
            f"the arguments name no DeepSpeed configuration: {list(args)}",
            where="get_hf_args_with_overwrites",
            hint=f"Add {_HF_CONFIG_FLAG} with the path of the file, for example "
            f"{_HF_CONFIG_FLAG} ds_config.json.",
        )
    base = ds_config.read(Path(path))
    merged = ds_config.prepare_for_training(base, overrides)
    if merged != base:
        path = str(_file_of(merged))
    mappings = {**script_args.HF_BATCH_FLAGS, _HF_CONFIG_FLAG: _HF_CONFIG_FLAG}
    values = {**merged, _HF_CONFIG_FLAG: path}
    return list(script_args.rewrite(args, values, mappings, add=True))


@contextlib.contextmanager
def dsat_reporting_context(
    core_context: Any, op: Any, steps_completed: int | None = None
) -> Iterator[None]:
    """Report what dsat measures as the trial's result; outside a dsat run, do nothing.

    The engine's `forward`, `backward` and `step` must be called inside. Drop-in for
    `determined.pytorch.dsat.dsat_reporting_context`.

    Args:
        core_context: from `determined.core.init()`.
        op: the first operation of `core_context.searcher.operations()`.
        steps_completed: step number to report with the metrics; by default the last planned step
            (`--end-profile-step`) on a cluster, and the operation's length elsewhere.
    """
    from dsat.in_trial.meter import TrialComplete

    task = _attach(hparams_of_this_task())
    # Outside a run there may be no operation.
    common = getattr(op, "length", 0) if task is None else task.meter.spec.options.end_step
    steps = common if steps_completed is None else steps_completed
    if task is not None:
        task.follow(core_context, op, steps)
    try:
        yield
    except TrialComplete as complete:
        if task is not None:
            task.report(task.ended())
            task.stay_until_closed()
            if core_context.distributed.rank == 0:
                # Otherwise the master assumes that the script has missed its operations.
                core_context.searcher.acknowledge_out_of_ops()
        elif core_context.distributed.rank == 0:
            metrics = complete.outcome.to_json()["metrics"]
            core_context.train.report_validation_metrics(steps_completed=steps, metrics=metrics)
            op.report_completed(metrics)
        raise
    except BaseException as error:
        if task is not None:
            task.report_failure(error)
        raise


def _attach(hparams: Mapping[str, Any] | None) -> Task | None:
    """On a cluster, make this process a rank of the trial that `hparams` names, if it names one.

    The hyperparameters of a full-length training name no trial, but may have switches to set.
    """
    if not hparams or not hparams.keys() & {DSAT_TRIAL_KEY, DSAT_SWITCHES_KEY}:
        return None
    from dsat.in_trial import cluster_rank as task

    attached = task.attach(hparams)
    # DeepSpeedTrial calls determined's context, which reports fewer kinds of outcomes.
    ancestor: Any = sys.modules.get("determined.pytorch.dsat")
    if attached is not None and ancestor is not None:
        ancestor.dsat_reporting_context = dsat_reporting_context
    return attached


def hparams_of_this_task() -> Mapping[str, Any] | None:
    """Return the hyperparameters of this Determined trial; None outside of one."""
    determined: Any = sys.modules.get("determined")
    info = None if determined is None else determined.get_cluster_info()
    if info is None or info.task_type != "TRIAL":
        return None
    hparams: Mapping[str, Any] = info.trial.hparams
    return hparams


def _file_of(config: Mapping[str, Any]) -> Path:
    """Write a configuration to a file that is named after its content; return the path.

    So all ranks of a trial use the same file, whichever rank writes it.
    """
    # Not in the user's folder, which may be shared, read-only or kept under version control.
    folder = os.environ.get(TRIAL_VARIABLE)
    name = f"ds_config_{ds_config.fingerprint(config)[:16]}.json"
    if folder is None:
        folder, name = tempfile.gettempdir(), f"dsat_{os.getuid()}_{name}"
    path = Path(folder) / name
    write_atomically(path, json.dumps(config, indent=2) + "\n")
    return path.resolve()
