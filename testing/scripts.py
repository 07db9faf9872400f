"""Training scripts that tests write and run as trials of a real engine.

A test states a script and a configuration, and expects an outcome, notes and files. The script may
use the module `plain` in its folder: `note` records what a rank sees; `make_engine` and `train` do
what most scripts do.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsat.values.outcome import Outcome
from dsat.values.trial import Trial, TrialKind
from testing.local import PATIENCE_S, Bench, engine_of, read_json, warnings_of

PLAIN = """
import argparse, json, os
from pathlib import Path

import deepspeed
import torch

RANK = int(os.environ.get("RANK", "0"))
FOLDER = Path(os.environ["DSAT_TRIAL_DIR"])
_notes = {}


def own_config():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--deepspeed_config")
    path, _ = parser.parse_known_args()
    return json.loads(Path(path.deepspeed_config).read_text())


def note(**facts):
    _notes.update(facts)
    part = FOLDER / f"notes{RANK}.part"
    part.write_text(json.dumps(_notes))
    os.replace(part, FOLDER / f"notes{RANK}.json")


def make_engine(model=None, config=None, **more):
    model = model or torch.nn.Linear(16, 1)
    more = {"model_parameters": model.parameters(), **more}
    return deepspeed.initialize(model=model, config=config or own_config(), **more)[0]


def train(engine, steps=1000, rows=None):
    rows = rows or engine.train_micro_batch_size_per_gpu()
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randn(rows, 16)).square().mean())
        engine.step()
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6},
}


@dataclass(frozen=True)
class Ended:
    """A trial that has ended."""

    outcome: Outcome
    folder: Path

    def notes(self, rank: int = 0) -> dict[str, Any]:
        """Return the notes of a rank."""
        assert (self.folder / f"notes{rank}.json").exists(), (self.outcome, self.log)
        notes: dict[str, Any] = read_json(self.folder / f"notes{rank}.json")
        return notes

    @property
    def warnings(self) -> tuple[str, ...]:
        return warnings_of(self.outcome)

    @property
    def log(self) -> str:
        names = ("stdout.log", "stderr.log")
        return "".join((self.folder / name).read_text() for name in names)

    def well(self) -> Ended:
        """Check that the trial was measured, and return this."""
        assert self.outcome.ok, (self.outcome, self.log)
        return self


class Scripts:
    """A folder with a training script that each trial rewrites, and an engine for it.

    Args:
        folder: parent of the script's folder `work` and the run's folder `run`.
        options: arguments of `testing.local.engine_of`, including `slots_per_trial`.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self.work, self.run_folder = folder / "work", folder / "run"
        for path in (self.work, self.run_folder):
            path.mkdir()
        experiment = {
            "name": "scripts",
            "entrypoint": "deepspeed train.py --deepspeed_config ds_config.json",
            "hyperparameters": {"deepspeed_config": "ds_config.json"},
            "searcher": {"name": "single", "metric": "loss", "max_length": 20},
        }
        for name, content in (("deepspeed.yaml", experiment), ("ds_config.json", CONFIG)):
            (self.work / name).write_text(json.dumps(content))
        (self.work / "train.py").touch()
        (self.work / "plain.py").write_text(PLAIN)
        slots = options.setdefault("slots_per_trial", 1)
        options.setdefault("slots", slots)
        self.engine = engine_of(str(self.work), self.run_folder, **options)
        self._bench = Bench(self.engine, self.run_folder, slots)

    def trial(
        self,
        script: str,
        *,
        config: Mapping[str, Any] | None = None,
        switches: Mapping[str, Any] | None = None,
        kind: TrialKind = TrialKind.SEARCH,
        micro_batch: int = 2,
        gas: int = 1,
        zero: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Trial:
        """Write the script, and return a trial of it.

        Args:
            config: further settings of the trial.
            switches: values of the script's switches in the trial.
            more: further fields of the trial.
        """
        (self.work / "train.py").write_text(f"from plain import *\n{script}")
        plain = self._bench.trial(kind=kind, micro_batch=micro_batch, gas=gas)
        sections = {"zero_optimization": {"stage": 1, **(zero or {})}, **(config or {})}
        overrides = {**plain.overrides, **sections}
        stage = overrides["zero_optimization"]["stage"]
        return replace(
            plain, overrides=overrides, stage=stage, script_args=dict(switches or {}), **more
        )

    def run(self, script: str, **of_trial: Any) -> Ended:
        """Run a script as a trial; arguments as in `trial`."""
        trial = self.trial(script, **of_trial)
        return Ended(self._bench.run(trial), self._bench.path(trial))

    def run_in_full(self, script: str) -> Ended:
        """Run a script at full length, without a measurement."""
        folder = self.engine.train(self.trial(script))
        [(_, outcome)] = self.engine.poll(PATIENCE_S)
        return Ended(outcome, folder)


@contextlib.contextmanager
def scripts_in(folder: Path, **options: Any) -> Iterator[Scripts]:
    """Make a folder for scripts, whose trials take about a second (`testing.warm_host`)."""
    scripts = Scripts(folder, **{"imported": True, **options})
    try:
        yield scripts
    finally:
        scripts.engine.close()
