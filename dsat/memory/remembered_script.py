"""Cache of a script's simulations, valid until a file that the script read changes."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment
from dsat.values.files import stamp, write_cache

# Variables that differ from terminal to terminal, on which no model depends.
_OF_TERMINALS = (
    *("_", "COLUMNS", "LINES", "OLDPWD", "PS1", "SHLVL", "STY", "TERM", "TMUX", "WINDOWID"),
    *("COLORTERM", "DBUS_SESSION_BUS_ADDRESS", "GPG_TTY", "SSH_AUTH_SOCK", "TERM_PROGRAM"),
    *("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "TMUX_PANE", "VTE_VERSION", "XDG_SESSION_ID"),
)
_PACKAGES = ("site-packages", "dist-packages")


def start_of(experiment: Experiment, program: Entrypoint) -> dict[str, Any]:
    """Return the start of a script as JSON: equal starts read the same files."""
    return {
        "program": asdict(program),
        "config": experiment.config,
        "hparams": experiment.hparams,
        "ds_config": experiment.base_config,
        "model_dir": str(experiment.model_dir.resolve()),
        "includes": [str(path.resolve()) for path in experiment.includes],
        "env": experiment.env,
        "arg_mappings": experiment.arg_mappings,
    }


@dataclass(frozen=True)
class ScriptModel:
    """A script's description of its model.

    Attributes:
        sizes: of its parameters, as `ModelFacts` has them.
        sequence_length: tokens of a sample of its first batch, if samples are sequences.
        files: `stamp` of each file that the script read; None if it also asked the network.
    """

    sizes: dict[str, int]
    sequence_length: int | None
    files: list[list[Any]] | None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScriptModel:
        return cls(data["sizes"], data["sequence_length"], data["files"])


class RememberedScript:
    """Model and simulations of a script that is started in one way.

    Args:
        cache: folder of the cache.
        start: description of the start, as JSON. The environment, the interpreter, installed
            packages and devices are added.

    Attributes:
        model: None if the script has to be started.
        answers: simulations of it, by question.
    """

    def __init__(self, cache: Path, start: Mapping[str, Any]) -> None:
        text = json.dumps([start, _surroundings()], sort_keys=True, default=str)
        self._path = cache / f"script-{hashlib.sha256(text.encode()).hexdigest()}.json"
        self.model: ScriptModel | None = None
        self.answers: dict[str, dict[str, Any]] = {}
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            model, answers = ScriptModel.from_json(data["script"]), dict(data["answers"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        if model.files is not None and all(stamp(known[0]) == known for known in model.files):
            self.model, self.answers = model, answers

    def keep(self, model: ScriptModel, answers: Mapping[str, Any]) -> None:
        """Write the model and its simulations; failed ones are left out."""
        if model.files is not None:
            kept = {key: answer for key, answer in answers.items() if "failed" not in answer}
            content = {"script": asdict(model), "answers": kept}
            write_cache(self._path, json.dumps(content) + "\n")


def _surroundings() -> list[Any]:
    env = {key: value for key, value in os.environ.items() if key not in _OF_TERMINALS}
    # An installation changes the folder that it goes to; a driver that is loaded has devices.
    folders = [stamp(path) for path in sys.path if path.endswith(_PACKAGES)]
    devices = [entry.name for entry in os.scandir("/dev") if _is_accelerator(entry)]
    return [os.getcwd(), sys.executable, sys.version, env, folders, sorted(devices)]


def _is_accelerator(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(("accel", "davinci", "dri", "hl", "kfd", "nvidia", "xpu"))
