"""What DeepSpeed refuses for what several settings say together, asked before anything is run."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.app.installed_deepspeed import InstalledDeepSpeed, environment
from dsat.errors import UserInputError
from dsat.inputs import ds_config, plain_settings
from dsat.inputs.ds_config import BATCH_KEYS
from dsat.inputs.entrypoint import Entrypoint
from dsat.space.plan import Plan
from dsat.tuning import refused, strategies
from dsat.values import slow
from dsat.values.files import PRIVATE_FOLDER, cache_folder, write_atomically

_log = logging.getLogger(__name__)

_ASKER = "dsat.in_trial.simulation.refusals"
_TIMEOUT_S = 300.0
# What no engine is refused for, and is often edited.
_INDIFFERENT = frozenset((*BATCH_KEYS[:2], "scheduler", "steps_per_print", "wall_clock_breakdown"))


class Refusals:
    """The installed DeepSpeed's objections to whole configurations, remembered.

    Most configurations have none of the settings that any objection was seen to concern; of these
    it is not asked, which takes seconds.

    Args:
        deepspeed: the installed one.
    """

    def __init__(self, deepspeed: InstalledDeepSpeed) -> None:
        self._deepspeed = deepspeed
        self._known: dict[str, str | None] = {}

    def check(self, config: Mapping[str, Any], slots: int, *, where: str) -> None:
        """Raises UserInputError if DeepSpeed refuses a configuration.

        Args:
            config: the user's own.
            slots: data-parallel slots of a trial.
            where: the file to name.
        """
        [objection] = self.objections([config], slots)
        if objection is not None:
            assert self._deepspeed.schema is not None
            version = self._deepspeed.schema.version
            raise UserInputError(f"DeepSpeed {version} refuses it: {objection}", where=where)

    def without_refused(self, plan: Plan, program: Entrypoint, *, where: str) -> Plan:
        """A plan that leaves out what DeepSpeed refuses.

        Args:
            plan: of the user's own configuration, with everything that may be tried.
            program: what is run; nothing is asked where it uses another DeepSpeed.
            where: the file of the configuration, to name in errors.

        Raises:
            UserInputError: the user's own configuration is refused, or all that may be tried.
        """
        if program.interpreter or self._deepspeed.schema is None:
            return plan
        slots = plan.slots_per_trial
        own = plan.config({})
        self.objections([own, *refused.first_questions(plan)], slots)  # all at once, if any
        self.check(own, slots, where=where)
        found = refused.of_plan(plan, lambda configs: self.objections(configs, slots))
        for line in found.lines:
            _log.info("%s", line)
        plan = replace(plan, refused=found.settings)
        if not strategies.searched(plan):
            raise UserInputError(f"nothing is left to try: {found.lines[0]}", where=where)
        return plan

    def objections(self, configs: Sequence[Mapping[str, Any]], slots: int) -> list[str | None]:
        """What DeepSpeed says against each; None of what it takes, or cannot be asked of."""
        schema = self._deepspeed.schema
        if schema is None:
            return [None] * len(configs)
        unknown: dict[str, dict[str, Any]] = {}
        keys = []
        for config in configs:
            of_engine = {k: v for k, v in config.items() if k not in _INDIFFERENT}
            key = self._key(of_engine, slots)
            keys.append(key)
            if plain_settings.is_plain(config, schema):
                self._known[key] = None
            elif key not in self._known and not self._remembers(key):
                unknown[key] = of_engine
        if unknown:
            with slow.told(_log, f"asking DeepSpeed about {len(unknown)} configurations"):
                self._ask(unknown, slots)
        return [self._known[key] for key in keys]

    def _ask(self, configs: Mapping[str, Mapping[str, Any]], slots: int) -> None:
        answers = _ask(list(configs.values()), slots)
        for key, answer in zip(configs, answers or [None] * len(configs), strict=True):
            self._known[key] = answer
            if answers is not None:
                _remember(key, answer)

    def _remembers(self, key: str) -> bool:
        try:
            found = json.loads(_file(key).read_text(encoding="utf-8"))
            self._known[key] = found["objection"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def _key(self, config: Mapping[str, Any], slots: int) -> str:
        text = f"{self._deepspeed.stamp} {slots} {ds_config.fingerprint(config)}"
        return hashlib.sha256(text.encode()).hexdigest()


def _ask(configs: Sequence[Mapping[str, Any]], slots: int) -> list[str | None] | None:
    """The objections; None if it cannot be asked."""
    with tempfile.TemporaryDirectory(prefix="dsat-") as name:
        folder = Path(name)
        questions, answers = folder / "questions.json", folder / "answers.json"
        questions.write_text(json.dumps({"slots": slots, "configs": configs}), encoding="utf-8")
        try:
            subprocess.run(  # noqa: S603
                [sys.executable, "-m", _ASKER, str(questions), str(answers)],
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_TIMEOUT_S,
            )
            found: list[str | None] = json.loads(answers.read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _log.info("DeepSpeed cannot be asked what it refuses: %s", error)
            return None


def _file(key: str) -> Path:
    return cache_folder("deepspeed") / f"refused-{key}.json"


def _remember(key: str, objection: str | None) -> None:
    path = _file(key)
    try:
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"objection": objection}))
    except OSError as error:
        _log.debug("%s: %s", path, error)
