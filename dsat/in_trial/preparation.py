"""Preparation of a process to be a rank of a trial, however it was started."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import wrapt

from dsat.in_trial import (
    available_memory,
    config_injection,
    determined_shim,
    hf_trainer,
    lightning_trainer,
    loopback,
    meter,
)
from dsat.in_trial.meter import Meter
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.rank_files import CONFIG_FILE, Progress, RankSpec
from dsat.in_trial.script_switches import ScriptSwitches
from dsat.in_trial.side_effects import SideEffects
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial

# Variables that torch, DeepSpeed and what they load set by themselves.
_SET_BY_LIBRARIES = tuple(
    "ACCELERATE_ CROSS_ CUDA_ DS_ KMP_ NCCL_ PYTORCH_ TOKENIZERS_PARALLELISM TORCH TRITON_".split()
)


def prepare(
    spec: RankSpec,
    folder: Path,
    progress: Progress,
    *,
    on_complete: Callable[[Outcome], None],
    on_step: Callable[[int], None],
) -> Meter | None:
    """Adapt the libraries that a script uses to the trial.

    Returns:
        The meter, which calls `on_complete` and `on_step`; None if the script is not measured.
    """
    import torch

    trial, on_cpu = Trial.from_json(spec.trial), not spec.task["devices"]
    if spec.defaults_local_rank:
        _default_local_rank(os.environ["LOCAL_RANK"])
    _show_compilations(progress)
    if spec.threads:
        torch.set_num_threads(spec.threads)
    loopback.install()
    determined_shim.install(determined_shim.LocalTask(**{**spec.task, "folder": folder}))
    if spec.program["trial_class"]:
        determined_shim.adapt_trial_classes(on_cpu=on_cpu)
    found = None
    if spec.meter is not None:
        found = meter.install(MeterSpec.from_json(spec.meter), on_complete, on_step)
    warn = _print if found is None else found.warn
    if found is None and spec.simulation_socket is None:
        available_memory.adapt(None, warn)
    if not spec.own:
        path = folder / CONFIG_FILE
        config = json.loads(path.read_text())
        config_injection.install(config, trial.overrides, path)
        lightning_trainer.install(trial.batch.gas, warn)
        if spec.simulation_socket is None:  # one script is simulated in all stages
            config_injection.keep_models_whole(config, warn)
    compiles_deep = (trial.overrides.get("compile") or {}).get("deepcompile") is True
    switches = ScriptSwitches(trial.script_args, on_cpu=on_cpu, deep_compiles=compiles_deep)
    if spec.simulation_socket is None:
        config_injection.on_initialize(switches.before_engine, switches.after_engine)
    if found is not None:
        found.switches = switches.found
    settings = hf_trainer.TrainerSettings(
        trial,
        None if spec.own else folder / CONFIG_FILE,
        switches,
        max_steps=None if found is None else found.spec.longest,
        batch_in_file=bool(spec.program["launch"].get("batch_in_file")),
    )
    hf_trainer.install(settings, warn, on_cpu=on_cpu)
    return found


def prevent_side_effects(spec: RankSpec, folder: Path, effects: SideEffects | None = None) -> None:
    """Keep a trial from changing anything outside its folder; a full-length run may.

    The recorder of the configuration that the script passes comes first.
    """
    if not spec.is_full_run:
        effects = effects or SideEffects(folder)
        effects.prevent(simulated=spec.simulation_socket is not None)


def _default_local_rank(local_rank: str) -> None:
    """Give a script that is started without a launcher the `--local_rank` that a launcher passes.

    Its default is mostly 0 or -1, and DeepSpeed refuses to run if it is not the rank's own.
    """

    def with_default(original: Any, _: Any, flags: Any, options: Any) -> Any:
        if "--local_rank" in flags and "action" not in options:
            options = {**options, "default": int(local_rank), "required": False}
        return original(*flags, **options)

    wrapt.wrap_function_wrapper(argparse, "_ActionsContainer.add_argument", with_default)


def libraries(known: set[str], before: Mapping[str, str]) -> list[str]:
    """Return the imported modules of installed packages, in order, if they may be imported early.

    Some packages import most of theirs only when they are used.

    Returns:
        Nothing if the program set environment variables, which may be for these modules, or if one
        of them imported `deepspeed.initialize` itself, which dsat could then no longer replace.
    """
    import deepspeed

    changed = {key for key, value in os.environ.items() if before.get(key) != value}
    if any(not key.startswith(_SET_BY_LIBRARIES) for key in changed):
        return []
    found = []
    for name, module in list(sys.modules.items()):
        if name in known or name == "__main__":
            continue
        names = list(getattr(module, "__dict__", {}).values())
        if any(value is deepspeed.initialize for value in names):
            return []
        if "site-packages" in str(getattr(module, "__file__", "") or ""):
            found.append(name)
    return found


def _show_compilations(progress: Progress) -> None:
    def show(original: Any, builder: Any, args: Any, options: Any) -> Any:
        before = progress.activity
        progress.set_activity(f"compiling DeepSpeed's operator {builder.name}; the result is kept")
        try:
            return original(*args, **options)
        finally:
            progress.set_activity(before)

    wrapt.wrap_function_wrapper("deepspeed.ops.op_builder.builder", "OpBuilder.jit_load", show)


def _print(text: str) -> None:
    print(f"dsat: {text}", file=sys.stderr)
