"""Answers of the installed DeepSpeed about a configuration, remembered from run to run."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dsat.errors import UserInputError
from dsat.inputs.autotuning_section import SECTION
from dsat.inputs.ds_config import BATCH_KEYS
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import OVERRIDES, Experiment
from dsat.space.knobs import KNOBS
from dsat.values import slow
from dsat.values.files import PRIVATE_FOLDER, cache_folder

_log = logging.getLogger(__name__)

_TIMEOUT_S = 120.0
_PROGRAM = "dsat.in_trial.config_check"
# Files of DeepSpeed that the answers depend on besides its version, for those who work on it.
_SOURCES = tuple(
    f"runtime/{name}.py"
    for name in "config precision_config zero/config zero/offload_config".split()
)


@dataclass(frozen=True)
class _Question:
    """A configuration to check.

    Attributes:
        place: the file, and the keys that lead to the configuration in it.
        whole: it is a whole configuration and not a part of one.
        own: keys that the user's own configuration has, if unknown ones besides are refused.
    """

    place: str
    config: Mapping[str, Any]
    whole: bool = False
    own: Mapping[str, Any] | None = None


class InstalledDeepSpeed:
    """The DeepSpeed beside dsat, asked in a process of its own, because its import takes seconds.

    Used as a context manager. `begin` asks ahead of time, `check` waits for the answer. Where there
    is no DeepSpeed, or trials run with another one, nothing is refused: the trials will tell.
    """

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = {}

    def __enter__(self) -> InstalledDeepSpeed:
        return self

    def __exit__(self, *_: object) -> None:
        for asked in self._asked.values():
            asked.close()

    def begin(self, experiment: Experiment, program: Entrypoint) -> None:
        """Ask about a configuration, unless the answer is known; does not wait."""
        if not program.interpreter:
            self._ask(list(_questions(experiment)))

    @property
    def has_answered(self) -> bool:
        """Tell whether all answers are there, so that `check` does not wait."""
        return all(asked.is_over for asked in self._asked.values())

    def check(self, experiment: Experiment, program: Entrypoint) -> None:
        """Check the user's configuration, their overrides and the values that they list.

        Raises:
            UserInputError: DeepSpeed refuses a key, a type, a value or the whole.
        """
        questions = list(_questions(experiment))
        asked = None if program.interpreter else self._ask(questions)
        answer = None if asked is None else asked.answer
        if answer is None:
            return
        for question, verdict in zip(questions, answer["verdicts"], strict=True):
            problem, place = verdict["problem"], question.place
            if problem is not None:
                if problem["path"]:
                    place += f"{'.' if ': ' in place else ': '}{problem['path']}"
                raise UserInputError(problem["message"], where=place, hint=problem["hint"].strip())
            for key in verdict["ignored"]:
                if question.own is not None and key not in question.own:
                    raise UserInputError(
                        f"DeepSpeed {answer['version']} reads no setting {key!r}",
                        where=f"{place}.{key}",
                        hint=verdict["hints"][key].strip(),
                    )
        ignored = ", ".join(answer["verdicts"][0]["ignored"])
        if ignored:
            where = experiment.ds_config_name
            _log.info("%s: DeepSpeed %s does not read %s", where, answer["version"], ignored)

    def knob_defaults(self, program: Entrypoint) -> dict[str, Any]:
        """Return DeepSpeed's defaults of the knobs that it has, by their paths.

        Empty if it cannot be asked.
        """
        if program.interpreter:
            return {}
        known = (asked.answer for asked in self._asked.values() if asked.is_over)
        found = next((answer for answer in known if answer is not None), None)
        if found is None:
            asked = self._ask([])
            found = None if asked is None else asked.answer
        return {} if found is None else dict(found["defaults"])

    def _ask(self, questions: list[_Question]) -> _Asked | None:
        stamp = _stamp()
        if stamp is None:
            return None
        configs = [{"config": q.config, "whole": q.whole} for q in questions]
        text = json.dumps({"configs": configs, "defaults": [knob.path for knob in KNOBS]})
        key = hashlib.sha256(f"{stamp} {text}".encode()).hexdigest()
        if key not in self._asked:
            self._asked[key] = _Asked(cache_folder("deepspeed") / f"{key}.json", text)
        return self._asked[key]


class _Asked:
    """A process that answers questions, or its answer, which is kept in a file.

    Args:
        path: the file.
        text: the questions.
    """

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if _read(path) is None:
            self._begin(text)

    def _begin(self, text: str) -> None:
        try:
            self._path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(prefix="dsat-")
            questions = Path(self._folder.name) / "questions.json"
            questions.write_text(text, encoding="utf-8")
            with open(questions.with_name("stderr"), "wb") as errors:
                self._process = subprocess.Popen(  # noqa: S603
                    [sys.executable, "-m", _PROGRAM, str(questions), str(self._path)],
                    cwd=self._folder.name,  # without modules that would be taken for others
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
        except OSError as error:
            _log.info("DeepSpeed cannot check the configuration: %s", error)

    @property
    def is_over(self) -> bool:
        return self._process is None or self._process.poll() is not None

    @functools.cached_property
    def answer(self) -> dict[str, Any] | None:
        """The answer; None if there is none. Waits for it."""
        if self._process is not None:
            with slow.told(_log, "checking the configuration with DeepSpeed"):
                self._wait(self._process)
        return _read(self._path)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        assert self._folder is not None
        try:
            if process.wait(_TIMEOUT_S) == 0:
                return
            text = (Path(self._folder.name) / "stderr").read_text(errors="replace")
            why = (text.strip().splitlines() or ["it says nothing"])[-1]
        except subprocess.TimeoutExpired:
            why = f"no answer within {_TIMEOUT_S:g} s"
        _log.info("DeepSpeed cannot check the configuration: %s", why)

    def close(self) -> None:
        """End the process, if it is not over."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()


def _questions(experiment: Experiment) -> Iterator[_Question]:
    """Yield the user's configuration, their overrides and each listed value."""
    name, own, overrides = experiment.ds_config_name, experiment.ds_config, experiment.overrides
    yield _Question(name, _asked_of(own), whole=not overrides)
    if overrides:
        yield _Question(f"{experiment.path}: {OVERRIDES}", _asked_of(overrides), own=own)
        yield _Question(name, _asked_of(experiment.base_config), whole=True)
    for key, values in experiment.choices.items():
        if key not in BATCH_KEYS:
            yield from (_Question(name, {"zero_optimization": {key: value}}) for value in values)


def _asked_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the sections that dsat checks by itself."""
    return {key: value for key, value in config.items() if key not in (SECTION, *BATCH_KEYS)}


@functools.cache
def _stamp() -> str | None:
    """Return what tells the installed DeepSpeed from all others; None if there is none."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        versions = [version(name) for name in ("deepspeed", "torch", "dsat")]
        changed = [(folder / source).stat().st_mtime_ns for source in _SOURCES]
        program = Path(__file__).parents[1] / "in_trial" / f"{_PROGRAM.rpartition('.')[2]}.py"
        return json.dumps([str(folder), versions, changed, program.stat().st_mtime_ns])
    except (PackageNotFoundError, OSError):  # a stand-in, or another layout
        return None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _environment() -> dict[str, str]:
    package = str(Path(__file__).resolve().parents[2])
    given = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, [given]), package]),
        "PYTHONSAFEPATH": "1",
        "DS_ACCELERATOR": "cpu",  # a device is not needed, and may hang
    }
