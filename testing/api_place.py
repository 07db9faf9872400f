"""A user of the Python API, on a machine that is made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dsat
from dsat.engines.places import local as this_machine
from dsat.prepare import installed_deepspeed
from dsat.tuning import local
from dsat.tuning.settings import Settings
from testing.scenarios import MadeUpEngine, User, machine_of


class Place:
    """The engine "made-up" for a world, and the configurations that it has run."""

    def __init__(self, user: User, monkeypatch: pytest.MonkeyPatch) -> None:
        self.user, self.launched, self.settings = user, list[str](), list[Settings]()
        monkeypatch.chdir(user.folder)
        monkeypatch.setattr(installed_deepspeed, "_stamp", lambda: None)
        monkeypatch.setattr(local, "ENGINES", {})
        self.software("torch 2.9", monkeypatch)
        dsat.register_engine("made-up", self._engine)

    def software(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = replace(machine_of(self.user.world), software=(name,))
        monkeypatch.setattr(this_machine, "find_machine", lambda *_: machine)

    def _engine(self, ready: Any, folder: Path) -> MadeUpEngine:
        assert folder.is_dir()
        self.settings.append(ready.settings)
        engine, launch = MadeUpEngine(self.user.world, ready, folder), MadeUpEngine.launch

        def launched(trial: Any) -> None:
            self.launched.append(json.dumps(trial.overrides, sort_keys=True))
            launch(engine, trial)

        engine.launch = launched  # type: ignore[method-assign]
        return engine

    def tune(self, **options: Any) -> dsat.Result:
        self.launched.clear()
        usual: dict[str, Any] = {"engine": "made-up", "metric": "throughput"}
        usual |= {"max_trials": 6, "finals": 0, "train_batch_size": "any"}
        return dsat.tune("deepspeed.yaml", **{**usual, **options})
