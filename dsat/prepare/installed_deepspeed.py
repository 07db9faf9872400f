"""Check of a configuration by the installed DeepSpeed, whose answers are cached."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dsat import __version__
from dsat.command.ds_config import AUTOTUNING, BATCH_KEYS
from dsat.command.entrypoint import Entrypoint
from dsat.command.experiment import OVERRIDES, Experiment
from dsat.engines.machines.processes import variables_with_dsat
from dsat.errors import UserInputError
from dsat.space.deepspeed_settings import SETTINGS
from dsat.values import slow
from dsat.values.files import cache_folder, write_cache

_log = logging.getLogger(__name__)

_TIMEOUT_S = 120.0
_PROGRAM = "dsat.in_trial.config_check"
# DeepSpeed's files that decide the answers; developers may edit them without a new version.
_SOURCES = ("runtime/config.py", "runtime/zero/config.py", "runtime/zero/offload_config.py")


@dataclass(frozen=True)
class _Question:
    """A configuration to check.

    Attributes:
        place: file, and path of keys in it.
        whole: whether settings are also checked together.
        own: the user's configuration. Keys that DeepSpeed ignores are errors unless they are in it;
            None allows all keys.
    """

    place: str
    config: Mapping[str, Any]
    whole: bool = False
    own: Mapping[str, Any] | None = None


def check(experiment: Experiment, program: Entrypoint) -> dict[str, Any]:
    """Check the user's configuration, overrides and listed values with the installed DeepSpeed.

    DeepSpeed runs in a separate process, since its import takes seconds. Returns its defaults by
    path. If DeepSpeed is missing, does not run, or differs from the trials', everything passes and
    the result is empty. Raises UserInputError for a refused key, type, value or combination.
    """
    questions = list(_questions(experiment))
    answer = None if program.interpreter else _answer(questions)
    if answer is None:
        return {}
    problems: dict[str, UserInputError] = {}  # by place
    for question, verdict in zip(questions, answer["verdicts"], strict=True):
        if not (question.whole and problems):  # the whole repeats the problems of its parts
            for problem in _find_problems(question, verdict, answer["version"]):
                problems.setdefault(problem.where, problem)
    if problems:
        first, *further = problems.values()
        also = [f"Also {problem}" for problem in further]
        hint = " ".join(filter(None, [first.hint, *also]))
        raise UserInputError(first.problem, where=first.where, hint=hint)
    ignored = ", ".join(answer["verdicts"][0]["ignored"])
    if ignored:
        where = experiment.ds_config_name
        _log.info("%s: DeepSpeed %s does not read %s", where, answer["version"], ignored)
    return dict(answer["defaults"])


def _find_problems(
    question: _Question, verdict: Mapping[str, Any], version: str
) -> Iterator[UserInputError]:
    """Yield the settings that DeepSpeed refuses, and keys of overrides that it would ignore."""
    for problem in verdict["problems"]:
        place = question.place
        if problem["path"]:
            place += f"{'.' if ': ' in place else ': '}{problem['path']}"
        yield UserInputError(problem["message"], where=place, hint=problem["hint"].strip())
    for key, hint in verdict["ignored"].items():
        if question.own is not None and key not in question.own:
            yield UserInputError(
                f"DeepSpeed {version} reads no setting {key!r}",
                where=f"{question.place}.{key}",
                hint=hint.strip(),
            )


def _questions(experiment: Experiment) -> Iterator[_Question]:
    name, own, overrides = experiment.ds_config_name, experiment.ds_config, experiment.overrides
    yield _Question(name, _part_for_deepspeed(own), whole=not overrides)
    if overrides:
        yield _Question(f"{experiment.path}: {OVERRIDES}", _part_for_deepspeed(overrides), own=own)
        yield _Question(name, _part_for_deepspeed(experiment.base_config), whole=True)
    for key, values in experiment.choices.items():
        if key not in BATCH_KEYS:
            yield from (_Question(name, {"zero_optimization": {key: value}}) for value in values)


def _part_for_deepspeed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop sections that dsat checks itself."""
    return {key: value for key, value in config.items() if key not in (AUTOTUNING, *BATCH_KEYS)}


def _answer(questions: Sequence[_Question]) -> dict[str, Any] | None:
    """Return DeepSpeed's answer, from the cache if possible; None if there is none."""
    stamp = _stamp()
    if stamp is None:
        return None
    configs = [{"config": q.config, "whole": q.whole} for q in questions]
    paths = [setting.path for setting in SETTINGS]
    text = json.dumps({"configs": configs, "defaults": paths})
    name = hashlib.sha256(f"{stamp} {text}".encode()).hexdigest()
    path = cache_folder("deepspeed") / f"{name}.json"
    answer = _read(path)
    if answer is None:
        with slow.logged(_log, "checking the configuration with DeepSpeed"):
            answer = _ask(text)
        if answer is not None:
            write_cache(path, json.dumps(answer))
    return answer


def _stamp() -> str | None:
    """Return a key for the versions and files that decide the answers; None without DeepSpeed."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    program = Path(__file__).parents[1] / "in_trial" / "config_check.py"
    try:
        versions = [version("deepspeed"), version("torch"), __version__]
        files = [program, *(folder / source for source in _SOURCES)]
        return json.dumps([str(folder), versions, [file.stat().st_mtime_ns for file in files]])
    except (PackageNotFoundError, OSError):  # DeepSpeed or torch is installed in an unusual way
        return None


def _ask(questions: str) -> dict[str, Any] | None:
    """Return DeepSpeed's answer from another process; None if there is none."""
    try:
        with tempfile.TemporaryDirectory(prefix="dsat-") as folder:
            request, answer = Path(folder, "questions.json"), Path(folder, "answer.json")
            request.write_text(questions, encoding="utf-8")
            process = subprocess.run(  # noqa: S603
                [sys.executable, "-m", _PROGRAM, str(request), str(answer)],
                cwd=folder,  # has no modules that could hide installed ones
                # No device is needed, and a real one may hang.
                env=variables_with_dsat({"DS_ACCELERATOR": "cpu"}),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            if process.returncode == 0:
                return _read(answer)
        text = process.stderr.decode(errors="replace").strip()
        why = (text.splitlines() or [f"exit status {process.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    _log.info("DeepSpeed cannot check the configuration: %s", why)
    return None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
