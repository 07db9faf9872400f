"""An engine for simulations alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dsat.app.source import Source
from dsat.engines.local.engine import LocalEngine
from dsat.engines.local.hosts import Host
from dsat.engines.local.launch import LocalOptions
from dsat.engines.local.machine import find_machine_for_simulations
from dsat.in_trial.simulation.server import AS_IF_CUDA
from dsat.values.trial import TrialOptions

LOG = "simulation/stderr.log"
_IMPORTED = (
    "psutil",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.ops.adam",
    "dsat.in_trial.rank",
    "dsat.in_trial.simulation.borrowed_model",
)


def simulation_engine(source: Source, folder: Path, timeout_s: float) -> LocalEngine:
    """Return an engine that runs a script for simulations, on this machine.

    Args:
        source: the script and its configuration.
        folder: for its log, `LOG`.
        timeout_s: for it to come to its first step.
    """
    experiment = source.experiment
    return LocalEngine(
        replace(experiment, env={**experiment.env, AS_IF_CUDA: "1"}),
        source.program,
        [Host(find_machine_for_simulations())],
        folder,
        LocalOptions(TrialOptions(timeout_s=timeout_s), imported=_IMPORTED),
        slots_per_trial=1,
    )
