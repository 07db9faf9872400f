"""An engine for simulations alone, made when it is needed: its imports take seconds."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.app.source import Source
from dsat.engines.local import Host, LocalEngine, LocalOptions, find_machine_for_simulations
from dsat.in_trial.simulation.server import AS_IF_CUDA
from dsat.values.trial import TrialOptions

_IMPORTED = (
    "psutil",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.ops.adam",
    "dsat.in_trial.rank",
    "dsat.in_trial.simulation.borrowed_model",
)


class SimulationEngine:
    """Engine that runs a script for simulations, on this machine.

    Args:
        source: the script and its configuration.
        timeout_s: for it to come to its first step.

    Attributes:
        log: of the script.
    """

    def __init__(self, source: Source, timeout_s: float) -> None:
        self._source = source
        self._timeout_s = timeout_s
        self._engine: LocalEngine | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="dsat-"))

    @property
    def log(self) -> Path:
        return self.folder / "simulation" / "stderr.log"

    def start_simulation_server(self, address: Path, script_args: Mapping[str, Any]) -> Path:
        if self._engine is None:
            experiment = self._source.experiment
            self._engine = LocalEngine(
                replace(experiment, env={**experiment.env, AS_IF_CUDA: "1"}),
                self._source.program,
                [Host(find_machine_for_simulations())],
                self.folder,
                LocalOptions(TrialOptions(timeout_s=self._timeout_s), imported=_IMPORTED),
                slots_per_trial=1,
            )
        return self._engine.start_simulation_server(address, script_args)

    def has_simulation_server(self) -> bool:
        return self._engine is not None and self._engine.has_simulation_server()

    def stop_simulation_server(self) -> None:
        if self._engine is not None:
            self._engine.stop_simulation_server()

    def close(self) -> None:
        """End whatever runs; the folder stays."""
        if self._engine is not None:
            self._engine.close()
