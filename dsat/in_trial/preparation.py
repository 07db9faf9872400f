"""Preparation of a process to be a rank of a trial, however it was started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from dsat.in_trial import config_injection, loopback, meter
from dsat.in_trial.adapters.hf_trainer import TrainerSettings
from dsat.in_trial.adapters.trial import TRIAL
from dsat.in_trial.meter import Meter
from dsat.in_trial.rank_files import CONFIG_FILE, RankSpec
from dsat.in_trial.script_switches import ScriptSwitches
from dsat.values.outcome import Outcome

# Variables that torch, DeepSpeed and what they load set by themselves.
_SET_BY_LIBRARIES = tuple(
    "ACCELERATE_ CROSS_ CUDA_ DS_ KMP_ NCCL_ PYTORCH_ TOKENIZERS_PARALLELISM TORCH TRITON_".split()
)


def prepare(spec: RankSpec, folder: Path, on_complete: Callable[[Outcome], None]) -> Meter | None:
    """Adapt the libraries that a script uses to the trial.

    Returns the meter, which calls `on_complete`; None if the script is not measured.
    """
    import torch

    trial, on_cpu = spec.trial, not spec.task.devices
    if spec.defaults_local_rank:
        TRIAL.local_rank = os.environ["LOCAL_RANK"]
    if spec.threads:
        torch.set_num_threads(spec.threads)
    loopback.choose_interface()
    TRIAL.task, TRIAL.is_simulated = spec.task, spec.simulation_folder is not None
    found = None
    if spec.meter is not None:
        found = meter.install(spec.meter, on_complete)
    if not spec.own:
        path = folder / CONFIG_FILE
        config = json.loads(path.read_text())
        config_injection.install(config, trial.overrides, path)
        TRIAL.config = config
    switches = ScriptSwitches(trial.script_args, trial.overrides, on_cpu=on_cpu)
    if not TRIAL.is_simulated:
        config_injection.register_for_initialize(switches.before_engine, switches.after_engine)
    TRIAL.trainer = TrainerSettings(
        trial,
        None if spec.own else folder / CONFIG_FILE,
        switches,
        max_steps=None if found is None else found.spec.longest,
        batch_in_file=spec.program.launch.batch_in_file,
        on_cpu=on_cpu,
    )
    return found


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
