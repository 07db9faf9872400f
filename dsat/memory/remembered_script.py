"""What a script said of its model, for as long as nothing changes that it has read."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.values.files import stamp, write_atomically

# Variables that differ from terminal to terminal, of which no model depends.
_OF_TERMINALS = (
    *("_", "COLUMNS", "LINES", "OLDPWD", "PS1", "SHLVL", "STY", "TERM", "TMUX", "WINDOWID"),
    *("COLORTERM", "DBUS_SESSION_BUS_ADDRESS", "GPG_TTY", "SSH_AUTH_SOCK", "TERM_PROGRAM"),
    *("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "TMUX_PANE", "VTE_VERSION", "XDG_SESSION_ID"),
)
_PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class ScriptModel:
    """What a script says of its model.

    Attributes:
        description: all that memory depends on besides the DeepSpeed configuration.
        sizes: of its parameters, as `ModelFacts` has them.
        sequence_length: tokens of a sample of its first batch, if samples are such.
        files: those that decide of it, as `stamp` has them; None if more than files does.
    """

    description: list[Any]
    sizes: dict[str, int]
    sequence_length: int | None
    files: list[list[Any]] | None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScriptModel:
        return cls(data["model"], data["sizes"], data["sequence_length"], data.get("files"))

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.description,
            "sizes": self.sizes,
            "sequence_length": self.sequence_length,
            "files": self.files,
        }


class RememberedScript:
    """One way of starting a script, and what it said when it was last started so.

    Args:
        cache: folder of the answers.
        start: everything that tells one start from another, as JSON; the environment, the
            interpreter, installed packages and devices are added.
    """

    def __init__(self, cache: Path, start: Mapping[str, Any]) -> None:
        text = json.dumps([start, _surroundings()], sort_keys=True, default=str)
        self._path = cache / f"script-{hashlib.sha256(text.encode()).hexdigest()}.json"

    def find(self) -> ScriptModel | None:
        """What it said; None if it has to be asked."""
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            model = ScriptModel.from_json(data)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        is_same = all(stamp(known[0]) == known for known in model.files or ())
        return model if is_same and model.files is not None else None

    def keep(self, model: ScriptModel) -> None:
        if model.files is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(model.to_json()) + "\n")


def _surroundings() -> list[Any]:
    env = {key: value for key, value in os.environ.items() if key not in _OF_TERMINALS}
    # An installation changes the folder that it goes to; a driver that is loaded has devices.
    folders = [stamp(path) for path in sys.path if path.endswith(_PACKAGES)]
    devices = [entry.name for entry in os.scandir("/dev") if _is_accelerator(entry)]
    return [os.getcwd(), sys.executable, sys.version, env, folders, sorted(devices)]


def _is_accelerator(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(("accel", "davinci", "dri", "hl", "kfd", "nvidia", "xpu"))
