"""What the installed DeepSpeed accepts, asked once for each version and remembered."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from dsat.errors import UserInputError
from dsat.inputs import ds_config
from dsat.inputs import experiment as experiments
from dsat.inputs.ds_schema import Schema
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment
from dsat.space.knobs import KNOBS
from dsat.values import slow
from dsat.values.files import PRIVATE_FOLDER, cache_folder

_log = logging.getLogger(__name__)

_TIMEOUT_S = 120.0
_ASKER = "dsat.in_trial.deepspeed_schema"
# What the answer depends on besides its version, for whoever works on DeepSpeed itself.
_SOURCES = tuple(
    f"runtime/{name}.py"
    for name in "config engine precision_config zero/config zero/offload_config "
    "zero/stage_1_and_2 zero/stage3".split()
)
_ASKED_BY = ("deepspeed_schema.py",)


class InstalledDeepSpeed:
    """The DeepSpeed beside dsat, and what it says of itself.

    If that is not known yet, a process asks, since DeepSpeed takes seconds to import; meanwhile
    other things may be done. Used as a context manager.
    """

    def __init__(self) -> None:
        self._path = _remembered_in()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed on leaving)
        self._process: subprocess.Popen[bytes] | None = None
        if self._path is not None and _read(self._path) is None:
            self._process = _ask(self._path, self._errors)

    def __enter__(self) -> InstalledDeepSpeed:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    @property
    def has_answered(self) -> bool:
        """Whether what it says is known, or that it says nothing; otherwise that takes a while."""
        return self._process is None or self._process.poll() is not None

    @functools.cached_property
    def schema(self) -> Schema | None:
        """What it accepts; None if there is no DeepSpeed, or it cannot be asked."""
        if self._path is None:
            return None
        if self._process is not None:
            with slow.told(_log, "asking DeepSpeed which settings it knows"):
                self._wait(self._process)
        return _read(self._path)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        try:
            if process.wait(_TIMEOUT_S) == 0:
                return
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            why = (said or ["no word"])[-1]
        except subprocess.TimeoutExpired:
            why = f"no answer within {_TIMEOUT_S:g} s"
        _log.info("DeepSpeed cannot be asked which settings it knows: %s", why)

    def check(self, experiment: Experiment, program: Entrypoint) -> None:
        """Refuses what it refuses.

        Where trials run with another DeepSpeed, or none can be asked, they will tell.

        Raises:
            UserInputError: a key, a type or a value of the user's configuration is wrong.
        """
        schema = None if program.interpreter else self.schema
        if schema is None:
            check_overrides(experiment)
            return
        where = experiment.ds_config_name
        schema.check(experiment.ds_config, where=where)
        schema.check(experiment.overrides, where=str(experiment.path), within=experiments.OVERRIDES)
        known = {*schema.content["properties"], *experiment.ds_config}
        for key in schema.ignored(experiment.overrides):
            if key not in known:
                raise UserInputError(
                    f"DeepSpeed {schema.version} reads no setting {key!r}",
                    where=f"{experiment.path}: {experiments.OVERRIDES}.{key}",
                    hint=ds_config.did_you_mean(key, known).strip(),
                )
        for key, values in experiment.choices.items():
            of_zero = key not in schema.content["properties"]
            for value in values:
                part = {key: value}
                schema.check({"zero_optimization": part} if of_zero else part, where=where)
        ignored = schema.ignored(experiment.ds_config)
        if ignored:
            _log.info("%s: DeepSpeed %s reads no %s", where, schema.version, ", ".join(ignored))

    def knob_defaults(self, program: Entrypoint) -> dict[str, Any]:
        """What a program's ranks take for knobs that are not given, by their paths.

        Knobs that it has not got are not among them; empty if it cannot be asked.
        """
        schema = None if program.interpreter else self.schema
        found: dict[str, Any] = {}
        if schema is None:
            return found
        for knob in KNOBS:
            with contextlib.suppress(KeyError):
                found[knob.path] = schema.default(knob.path)
        return found


def check_overrides(experiment: Experiment) -> None:
    """Refuses settings that no DeepSpeed is known to have; for trials that run with another one.

    Raises:
        UserInputError: there is one among the user's overrides.
    """
    where = f"{experiment.path}: {experiments.OVERRIDES}"
    ds_config.check_keys(experiment.overrides, experiment.ds_config, where=where)


def _remembered_in() -> Path | None:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        versions = [version(name) for name in ("deepspeed", "torch", "dsat")]
        changed = [(folder / source).stat().st_mtime_ns for source in _SOURCES]
        asks = [(Path(__file__).parents[1] / "in_trial" / name).read_text() for name in _ASKED_BY]
    except (PackageNotFoundError, OSError):  # a stand-in, or another layout
        return None
    text = json.dumps([str(folder), versions, changed, asks])
    return cache_folder("deepspeed") / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _read(path: Path) -> Schema | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Schema(str(found["version"]), found["schema"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def environment() -> dict[str, str]:
    """Of a process that imports DeepSpeed to ask it something."""
    package = str(Path(__file__).resolve().parents[2])
    given = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, [given]), package]),
        "PYTHONSAFEPATH": "1",
        "DS_ACCELERATOR": "cpu",  # a device is not needed, and may be stuck
    }


def _ask(path: Path, errors: IO[bytes]) -> subprocess.Popen[bytes] | None:
    try:
        path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", _ASKER, str(path)],
            cwd=path.parent,  # where there are no modules that would be taken for others
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    except OSError as error:
        _log.info("DeepSpeed cannot be asked which settings it knows: %s", error)
        return None
