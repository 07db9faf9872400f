"""A step of the first minutes: its findings, and the commands and trials within its budget."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from dsat.engines.engine import LocalEngine
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import find_machine
from dsat.values.files import write_atomically
from dsat.values.outcome import Outcome
from dsat.values.trial import BatchTriple, Trial, TrialKind, TrialOptions

HERE = Path(__file__).parent
ADAM = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
_TO_STOP_S = 6.0  # time for a command to end after SIGINT, and to read its results
# The fewest steps that show the memory of a step with Adam's moments.
_FEW_STEPS = TrialOptions(
    timeout_s=120.0, start_step=2, end_step=3, max_steps=3, warm_up_s=0.1, measured_s=0.1
)
_numbers = itertools.count()


class StepFailed(Exception):
    """A finding differs from what it must be."""


@dataclass
class Step:
    """A step of the first minutes.

    Attributes:
        folder: for the step's files; its findings are in `FOLDER.json`.
        ends_s: the end of its budget, by `time.monotonic`.
        short: use small models, only to see that the step works.
        findings: value by name.
    """

    folder: Path
    ends_s: float
    short: bool
    findings: dict[str, Any] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds that a command may take."""
        return max(1.0, self.ends_s - time.monotonic() - _TO_STOP_S)

    def note(self, name: str, value: Any) -> None:
        """Record a finding: print it, and write it to the file."""
        self.findings[name] = value
        print(f"| {name} | {value} |", flush=True)
        text = json.dumps(self.findings, indent=1, default=str) + "\n"
        write_atomically(self.folder.with_suffix(".json"), text)

    def check(self, name: str, right: bool, value: Any) -> None:
        """Record a finding that must be right.

        Raises:
            StepFailed: `right` is false.
        """
        self.note(name, value)
        if not right:
            raise StepFailed(name)

    def command(
        self, words: Sequence[str], folder: Path | None = None, *, limit_s: float | None = None
    ) -> tuple[int, str, float]:
        """Run a command; at the time limit, interrupt it as Ctrl-C does.

        Returns:
            Its exit status, its output, and its seconds.
        """
        began_s, path = time.monotonic(), self.folder / f"command-{next(_numbers)}.log"
        with open(path, "w+") as log:
            process = subprocess.Popen(
                words,
                cwd=folder or self.folder,
                env=common.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(min(limit_s or self.left_s, self.left_s))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TO_STOP_S - 1)
                process.kill()
            status = process.wait()
        return status, path.read_text(), time.monotonic() - began_s

    def tool(self, *words: str) -> list[str]:
        """Return the output lines of a CUDA tool; none if the tool is missing."""
        if shutil.which(words[0]) is None:
            return []
        return self.command(words)[1].strip().splitlines()

    def script(
        self, model: str, config: Mapping[str, Any], *words: str, length: int, name: str = "work"
    ) -> tuple[Path, list[str]]:
        """Write a training script and its configuration into a folder.

        Args:
            model: a file of `benchmarks/models`.
            config: DeepSpeed settings that differ from the usual ones.
            words: further arguments of the script.
            length: tokens of a sample.
            name: name of the folder.

        Returns:
            The folder, and the script's command line there, without a launcher.
        """
        folder = self.folder / name
        folder.mkdir()
        for file in (HERE / "language_model.py", HERE.parent / "models" / f"{model}.json"):
            shutil.copy(file, folder)
        usual = {"bf16": {"enabled": True}, "optimizer": ADAM}
        allowed = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        (folder / "ds_config.json").write_text(json.dumps({**usual, **allowed, **config}))
        size = ["--length", "64", "--small"] if self.short else ["--length", str(length)]
        files = ["--model", f"{model}.json", "--deepspeed_config", "ds_config.json"]
        return folder, ["language_model.py", *files, *size, *words]


def engine_of(command: Sequence[str], folder: Path) -> contextlib.closing[LocalEngine]:
    """Make an engine whose trials run few steps of the script in a folder."""
    config = json.loads((folder / "ds_config.json").read_text())
    words, hosts = [sys.executable, *command], [Host(find_machine())]
    return contextlib.closing(common.engine_of(words, config, folder, hosts, _FEW_STEPS))


def run_trial(engine: LocalEngine, stage: int, **config: Any) -> Outcome:
    """Run a trial with one sample.

    Args:
        config: sections and keys that override the configuration.
    """
    batch, number = BatchTriple(1, 1, 1), next(_numbers)
    overrides = {**config, **batch.config()}
    trial = Trial(number, TrialKind.SEARCH, f"t{number}", stage, batch, overrides=overrides)
    return common.run_trial(engine, trial)


def line(outcome: Outcome) -> str:
    """Return an outcome as text for people."""
    took = f"{outcome.duration_s:.1f} s in all"
    if outcome.metrics is None:
        return f"{outcome.kind.value}, {took}: {outcome.message[:120]}"
    return f"{outcome.metrics.latency:.1f} ms a step +-{outcome.metrics.ci95:.0%}, {took}"


def gib(size: float | None) -> float | None:
    """Return bytes as rounded GiB."""
    return None if size is None else round(size / common.GIB, 3)


def median_and_worst(errors: Sequence[float]) -> str:
    """Return the median and the largest size of errors, as text for people."""
    sizes = [abs(error) for error in errors]
    return f"{statistics.median(sizes):.2%}, {max(sizes):.2%}" if sizes else "nothing to compare"
