"""Preparation of a process to be a rank of a trial, however it was started."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from dsat.in_trial import config_injection, loopback, meter
from dsat.in_trial.adapters import trackers
from dsat.in_trial.adapters.hf_trainer import TrainerSettings
from dsat.in_trial.adapters.trial import TRIAL
from dsat.in_trial.meter import Meter
from dsat.in_trial.rank_files import CONFIG_FILE, Progress, RankSpec
from dsat.in_trial.script_switches import ScriptSwitches
from dsat.values.outcome import Outcome

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

    Returns the meter, which calls `on_complete` and `on_step`; None if the script is not measured.
    """
    import torch

    trial, on_cpu = spec.trial, not spec.task.devices
    if spec.defaults_local_rank:
        TRIAL.local_rank = os.environ["LOCAL_RANK"]
    _show_compilations(progress)
    if spec.threads:
        torch.set_num_threads(spec.threads)
    loopback.choose_interface()
    TRIAL.task = spec.task
    found = None
    if spec.meter is not None:
        found = meter.install(spec.meter, on_complete, on_step)
    if not spec.own:
        path = folder / CONFIG_FILE
        config = json.loads(path.read_text())
        config_injection.install(config, trial.overrides, path)
        TRIAL.config = config
    compiles_deep = (trial.overrides.get("compile") or {}).get("deepcompile") is True
    switches = ScriptSwitches(trial.script_args, on_cpu=on_cpu, deep_compiles=compiles_deep)
    if spec.simulation_folder is None:
        config_injection.register_for_initialize(switches.before_engine, switches.after_engine)
    if found is not None:
        found.switches = switches.found
    TRIAL.trainer = TrainerSettings(
        trial,
        None if spec.own else folder / CONFIG_FILE,
        switches,
        max_steps=None if found is None else found.spec.longest,
        batch_in_file=spec.program.launch.batch_in_file,
        on_cpu=on_cpu,
    )
    return found


def prevent_side_effects(spec: RankSpec) -> None:
    """Make engines of a trial report nothing; a full-length run may report.

    The recorder of the script's configuration must come first.
    """
    TRIAL.is_simulated = spec.simulation_folder is not None
    if not spec.is_full_run:
        config_injection.register_for_initialize(trackers.disable_reports)


def libraries(known: set[str], before: Mapping[str, str]) -> list[str]:
    """Return imported modules of installed packages, in order, that may be imported early.

    Some packages import most modules only when they are used. If the program set environment
    variables, return none, because they may be for these modules.
    """
    changed = {key for key, value in os.environ.items() if before.get(key) != value}
    if any(not key.startswith(_SET_BY_LIBRARIES) for key in changed):
        return []
    found = []
    for name, module in list(sys.modules.items()):
        if name in known or name == "__main__":
            continue
        if "site-packages" in str(getattr(module, "__file__", "") or ""):
            found.append(name)
    return found


def _show_compilations(progress: Progress) -> None:
    @contextlib.contextmanager
    def show(name: str) -> Iterator[None]:
        before = progress.activity
        progress.set_activity(f"compiling DeepSpeed's operator {name}, once for all runs")
        try:
            yield
        finally:
            progress.set_activity(before)

    TRIAL.calls.around_compilations.append(show)
