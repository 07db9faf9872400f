"""Plans that dsat makes from a user's files, as a dry run prints them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from dsat.prepare import installed_deepspeed
from testing.scenarios import User
from testing.world import World

_DATA = {
    "entrypoint": "python3 train.py",
    "hyperparameters": {"deepspeed_config": "ds.json"},
}


@dataclass
class Reader:
    """A user who asks for plans; `command` is the command in the last plan."""

    user: User
    slots: int = 4
    command: list[str] = field(default_factory=list)

    def experiment(
        self, data: Mapping[str, Any], config: Mapping[str, Any], *options: object
    ) -> dict[str, Any]:
        """Return the plan of an experiment that has a file `ds.json`."""
        return self.text(json.dumps({**_DATA, **data}), config, *options)

    def command_line(self, config: Mapping[str, Any], *options: object) -> dict[str, Any]:
        """Return the plan of the command `train.py` with a file `ds.json`."""
        self._write(config)
        return self._plan("--ds-config", "ds.json", *options, "--", "train.py")

    def text(
        self, text: str, config: Mapping[str, Any] | None = None, *options: object
    ) -> dict[str, Any]:
        """Return the plan of an experiment with this text."""
        if config is not None:
            self._write(config)
        (self.user.folder / "deepspeed.yaml").write_text(text, encoding="utf-8")
        return self._plan("deepspeed.yaml", ".", *options)

    def _write(self, config: Mapping[str, Any]) -> None:
        self.user.world = World(slots=self.slots)
        self.user.has()
        (self.user.folder / "ds.json").write_text(json.dumps(config), encoding="utf-8")

    def _plan(self, *words: object) -> dict[str, Any]:
        at = words.index("--") if "--" in words else len(words)
        with mock.patch.object(installed_deepspeed, "_stamp", return_value=None):
            told = self.user.types("random", *words[:at], "--dry-run", "--json", *words[at:])
        assert told.status == 0, told.err
        self.command = told.json["command"]
        plan = told.json["plan"]
        assert isinstance(plan, dict)
        return plan


def listed(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the plan took from lists in the configuration, and the stages."""
    micro_batches = plan["micro_batches"]
    sizes = {"train_micro_batch_size_per_gpu": micro_batches} if micro_batches else {}
    return {**plan["choices"], **sizes, "stage": sorted(plan["zero_stages"])}
