"""Record of how a command starts its ranks, and of the configuration that the script passes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsat.command.placement import VISIBLE
from dsat.in_trial import config_injection
from dsat.in_trial.adapters.trial import TRIAL
from dsat.in_trial.agreement import rank_and_size
from dsat.in_trial.rank_files import RECORDS_FOLDER
from dsat.values.files import write_atomically
from dsat.values.parallelism import SEQUENCE_SIZE

_INFINITIES = (math.inf, -math.inf)
RECORD_PREFIX = "rank-"
_SPAWNED = "--multiprocessing-fork"  # argument of a process that multiprocessing spawns


def install(folder: Path, start: Mapping[str, Any], *, waits: bool) -> None:
    """In the first run, record this process when it calls `deepspeed.initialize` to train.

    In a run that is not the first, do nothing.

    Args:
        start: pid, argv, cwd, cores and env at the process's start.
        waits: whether the process then waits until it is killed, instead of training.
    """
    records = folder / RECORDS_FOLDER
    paths: list[Path] = []

    def record(arguments: Mapping[str, Any]) -> None:
        original = config_injection.trained_config(arguments)
        if paths or original is None:
            return
        config = original.content
        if config_injection.accelerate_makes_engines():  # it computes the total itself
            config = {key: value for key, value in config.items() if key != "train_batch_size"}
        if (shared := config_injection.shared_sequences(arguments)) > 1:
            config = {**config, SEQUENCE_SIZE: shared}
        content = _describe_process(folder, start, config)
        path = records / f"{RECORD_PREFIX}{os.getpid()}.json"
        paths.append(path)
        write_atomically(path, json.dumps(content))
        while waits:
            signal.pause()

    if records.is_dir():
        TRIAL.calls.before_engine.append(record)


def _describe_process(
    folder: Path, start: Mapping[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of a `RankStart` (`dsat.command.recorded_start`)."""
    rank, size = rank_and_size()
    # A script may choose its devices itself, before it imports torch.
    devices = {name: os.environ[name] for name in VISIBLE if name in os.environ}
    changes = devices.items() - start["env"].items()
    record = {
        "rank": rank,
        "size": size,
        "forked": os.getpid() != start["pid"],
        "executable": sys.executable,
        "prefix": sys.prefix,
        "version": list(sys.version_info[:2]),
        "command": list(sys.orig_argv),
        # A spawned process now has the arguments of the process that spawned it.
        "argv": list(sys.argv) if _SPAWNED in start["argv"] else start["argv"],
        "cwd": start["cwd"],
        "cores": start["cores"],
        "env": drop_hook(folder, start["env"], start["cwd"]),
        "env_later": dict(changes),
        "env_above": _devices_above(),
    }
    try:
        record["config"] = json.loads(json.dumps(_drop_infinities(config), allow_nan=False))
    except (TypeError, ValueError) as error:
        record["config_problem"] = str(error)
    return record


def _devices_above() -> dict[str, str]:
    """Return variables that choose devices, each from the nearest ancestor that started with it.

    DeepSpeed's launcher removes them before it starts the ranks.
    """
    import psutil

    variables: dict[str, str] = {}
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents():
            env = process.environ()
            variables = {name: env[name] for name in VISIBLE if name in env} | variables
    return variables


def drop_hook(folder: Path, env: Mapping[str, str], cwd: str) -> dict[str, str]:
    """Return variables whose `PYTHONPATH` has only absolute entries and none of dsat's folders."""
    variables = dict(env)
    entries = variables.pop("PYTHONPATH", "").split(os.pathsep)
    paths = [Path(cwd, entry) for entry in entries if entry]
    folders = [str(path) for path in paths if path.parent.resolve() != folder.resolve()]
    return {**variables, "PYTHONPATH": os.pathsep.join(folders)} if folders else variables


def _drop_infinities(value: Any) -> Any:
    """Drop infinities in dicts, such as accelerate's `steps_per_print`: JSON cannot hold them."""
    if isinstance(value, dict):
        return {key: _drop_infinities(v) for key, v in value.items() if v not in _INFINITIES}
    return [_drop_infinities(part) for part in value] if isinstance(value, (list, tuple)) else value
