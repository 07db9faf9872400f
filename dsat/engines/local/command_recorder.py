"""Runs a command once as it stands, to see how it starts its training."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsat.engines.local import trial_result
from dsat.engines.local.hosts import Host
from dsat.engines.local.launch import log_files
from dsat.engines.local.machine import Machine
from dsat.engines.local.supervisors import LOST, Supervisors
from dsat.errors import EngineError, ScriptFailed, UserInputError
from dsat.in_trial import start_recorder
from dsat.inputs.recorded_start import ONE_NODE, RankStart, check_one_training

_POLL_S = 0.1
# A command that goes on after its training may start another one, which imports torch first.
_REST_OF_THE_COMMAND_S = 20.0
_BETWEEN_RANKS_S = 30.0
_TRIAL = 0
_HERE = 0
# The command is run before the devices are looked at: its own errors are shown at once, and
# what it has of the devices is given back by then.
_NOT_LOOKED_AT = Machine(
    accelerator="", device_name="", devices=(), visible_devices=(), memory_bytes=0
)


def record(command: Sequence[str], cwd: Path, folder: Path, *, timeout_s: float) -> list[RankStart]:
    """How the ranks of a command's training are started. The training itself does not begin.

    Args:
        command: with its arguments, as a person types it.
        cwd: where.
        folder: an empty one, for logs and records.
        timeout_s: how long the command may take until its ranks are there.

    Raises:
        UserInputError: it is not one training on one machine.
        ScriptFailed: it ended, or took too long, without a call of `deepspeed.initialize`.
    """
    program = shutil.which(command[0])
    assert program is not None, command[0]
    hook, records = folder / "hook", folder / "records"
    hook.mkdir()
    records.mkdir()
    shutil.copyfile(start_recorder.__file__, hook / "sitecustomize.py")
    supervisors = Supervisors([Host(_NOT_LOOKED_AT)], folder, env={})
    try:
        supervisors.send(
            _HERE,
            {
                "op": "launch",
                "trial": _TRIAL,
                "folder": str(folder.resolve()),
                "cwd": str(cwd.resolve()),
                "port": 0,
                "command": [program, *command[1:]],
                "ranks": [{"env": _environment(hook, records, folder), "cores": []}],
                "logs": log_files(0),
                "linger_s": None,
            },
        )
        ranks, status = _watch(supervisors, records, timeout_s)
    finally:
        supervisors.close()
    if ranks:
        return ranks
    log = trial_result.log_tail(folder)
    if status is None:
        problem = f"it did not call deepspeed.initialize within {timeout_s:g} s (--trial-timeout)"
    elif status:
        problem = f"it ended with exit status {status} before it called deepspeed.initialize"
    else:
        problem = (
            "it ended without a call of deepspeed.initialize in a Python process that takes "
            "PYTHONPATH from its environment"
        )
    raise ScriptFailed(
        f"{command[0]}: {problem}. Its log is {folder / 'stderr.log'}", log or _printed(folder)
    )


def _watch(
    supervisors: Supervisors, records: Path, timeout_s: float
) -> tuple[list[RankStart], int | None]:
    """The ranks, once they are all there, and the command's exit status, if it ended."""
    heard_at, status, count = time.monotonic(), None, 0
    while status is None:
        for _, answer in supervisors.receive(_POLL_S):
            if answer["event"] == LOST:
                raise EngineError(answer["reason"])
            status = answer["statuses"][0]
        _check_nodes(records)
        ranks, now = _read(records), time.monotonic()
        if ranks:
            _check_repeated(ranks)
        if len(ranks) > count:
            heard_at, count = now, len(ranks)
        limit_s = timeout_s
        if ranks:
            is_complete = len(ranks) >= ranks[0].size
            limit_s = _REST_OF_THE_COMMAND_S if is_complete else _BETWEEN_RANKS_S
        if now - heard_at > limit_s:
            break
    return _read(records), status


def _check_repeated(ranks: Sequence[RankStart]) -> None:
    numbers = [rank.rank for rank in ranks]
    if len(set(numbers)) < len(numbers):
        check_one_training(ranks)


def _check_nodes(records: Path) -> None:
    path = records / start_recorder.SEVERAL_NODES_FILE
    if path.exists():
        nodes = json.loads(path.read_text())["nodes"]
        raise UserInputError(
            f"starts a training on {nodes} nodes, and trials run on this machine",
            where="command",
            hint=ONE_NODE,
        )


def _read(records: Path) -> list[RankStart]:
    paths = sorted(records.glob(f"{start_recorder.RECORD_PREFIX}*.json"))
    return [RankStart.from_json(json.loads(path.read_text())) for path in paths]


def _environment(hook: Path, records: Path, folder: Path) -> dict[str, str]:
    path = [str(hook.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    found: Mapping[str, str] = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        start_recorder.FOLDER_VARIABLE: str(records.resolve()),
        "DSAT_TRIAL_DIR": str(folder.resolve()),
    }
    return dict(found)


def _printed(folder: Path) -> str:
    """Programs like make say on standard output what went wrong."""
    path = folder / "stdout.log"
    return path.read_text(errors="replace")[-4096:] if path.exists() else ""
