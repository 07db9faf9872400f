"""A step's findings, and the engines that its trials run on."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from dsat.engines.engine import LocalEngine
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import Machine
from dsat.in_trial.rank_files import METRICS_FILE
from dsat.values.files import write_atomically
from dsat.values.outcome import Outcome
from dsat.values.trial import BatchTriple, Trial, TrialKind, TrialOptions

PROGRAM = Path(__file__).with_name("loop.py")
LIMIT_S = 600.0
_STATS_FILE = "memory_stats.json"


class StepFailed(Exception):
    """What was seen is not what must be."""


@dataclass
class Report:
    """The findings of a step, written as soon as each is there.

    Attributes:
        folder: for what it leaves; its findings are in `FOLDER.json`.
        machine: the slots.
        short: only so much as shows that the step runs.
        engines: what trials run on.
    """

    folder: Path
    machine: Machine
    short: bool
    engines: Engines
    findings: dict[str, Any] = field(default_factory=dict)

    def note(self, name: str, value: Any) -> None:
        self.findings[name] = value
        print(f"| {name} | {value} |", flush=True)
        text = json.dumps(self.findings, indent=1, default=str) + "\n"
        write_atomically(self.folder.with_suffix(".json"), text)

    def check(self, name: str, right: bool, value: Any = "") -> None:
        """Note a finding that must be so.

        Raises:
            StepFailed: it is not.
        """
        self.note(name, value if value != "" else right)
        if not right:
            raise StepFailed(f"{name}: {value}")

    def has_no_speed(self) -> bool:
        """Note that a step is left out, if devices compute nothing."""
        if self.short:
            self.note("left out", "devices that compute nothing have no speed")
        return self.short

    def lacks_nvcc(self) -> bool:
        """Note that a step is left out, if DeepSpeed's operators cannot be compiled."""
        is_missing = shutil.which("nvcc") is None
        if is_missing:
            self.note("left out", "no nvcc: DeepSpeed compiles its Adam with CUDA's headers")
        return is_missing

    def run(self, name: str, trial: Trial, *words: str, cold: bool = False, slots: int = 1) -> None:
        """Run a trial of the small program with these words, which must succeed, and keep what it
        measured."""
        engine = self.engines.get(*words, slots=slots, cold=cold)
        self.keep(name, trial, common.run_trial(engine, trial))

    def keep(self, name: str, trial: Trial, outcome: Outcome) -> None:
        """Note the outcome of a trial, which must have succeeded, and keep what it measured."""
        for file in (METRICS_FILE, _STATS_FILE):
            for found in self.engines.folder.glob(f"*/trials/{trial.name}/{file}"):
                shutil.copy(found, self.folder / f"{name.replace(' ', '-')}.{file}")
        self.check(name, outcome.ok, line(outcome))

    def command(self, words: Sequence[str], folder: Path) -> tuple[int, str, float]:
        """Run a command there, and keep what it said.

        Returns:
            Its exit status, what it said, and the seconds that it took.
        """
        status, said, took_s = common.run(words, folder, timeout_s=LIMIT_S)
        with open(self.folder / "commands.txt", "a") as log:
            log.write(f"{' '.join(words)}\n{said}\n")
        return status, said, took_s


class Engines:
    """Local engines for the small program beside this file, made when they are first asked for and
    shared by the steps.

    Args:
        machine: the slots.
        folder: for what trials leave.
        options: how trials are measured.
    """

    def __init__(self, machine: Machine, folder: Path, options: TrialOptions) -> None:
        self.folder = folder
        self._options = options
        self._machine = machine
        self._open: dict[tuple[tuple[str, ...], int, bool], LocalEngine] = {}
        shutil.rmtree(folder, ignore_errors=True)

    def get(self, *words: str, slots: int = 1, cold: bool = False) -> LocalEngine:
        """Return the engine whose trials have so many slots, and fresh processes or not.

        Args:
            words: for the program's command line.
        """
        key = (words, slots, cold)
        if key not in self._open:
            run = self.folder / f"{len(list(self.folder.glob('*')))}-{slots}"
            adam = {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}}
            base = {"optimizer": adam, "zero_optimization": {"stage": 1}}
            command = [sys.executable, str(PROGRAM), "--deepspeed_config", "ds_config.json", *words]
            hosts = [Host(self._machine)]
            self._open[key] = common.engine_of(
                command, base, run, hosts, self._options, slots=slots, cold=cold
            )
        return self._open[key]

    def close(self) -> None:
        for engine in self._open.values():
            engine.close()
        self._open.clear()


_numbers = itertools.count()


def new_trial(*, ranks: int = 1, stage: int = 1, **config: Any) -> Trial:
    """Make a trial that no other has the number of.

    Args:
        ranks: its slots.
        stage: of ZeRO.
        config: sections that are laid over the configuration.
    """
    batch, number = BatchTriple(4 * ranks, 4, 1), next(_numbers)
    zero = {"zero_optimization": {**config.pop("zero_optimization", {}), "stage": stage}}
    overrides = {**batch.config(), **zero, **config}
    return Trial(number, TrialKind.SEARCH, f"t{number}", stage, batch, overrides=overrides)


def line(outcome: Outcome) -> str:
    if outcome.metrics is None:
        return f"{outcome.kind.value}: {outcome.message}"
    return (
        f"{outcome.metrics.latency:.1f} ms a step +-{outcome.metrics.ci95:.0%}, "
        f"{outcome.duration_s:.1f} s in all"
    )
