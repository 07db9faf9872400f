"""Record of the processes of a run, so that they can be ended after a kill.

The supervisor leads a session, and all that the trials of a run start is in it unless it went out
of its way to leave. Sessions and ports are in a file of the run's folder.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import psutil

from dsat.values.files import PRIVATE_FILE

FILE_NAME = "processes.jsonl"
RUN_VARIABLE = "DSAT_RUN_DIR"
_TRIAL_VARIABLE = "DSAT_TRIAL_DIR"
_LOG = re.compile(r"std(out|err)(-\d+)?\.log")
_ROUNDS, _PAUSE_S = 200, 0.02
_CLOCK_SLACK_S = 1.0


class ProcessRecord:
    """The processes and ports of a run.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._path = self._folder / FILE_NAME

    def began(self, pid: int) -> None:
        """A supervisor began, the leader of a session of its own."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended at once
            started = psutil.Process(pid).create_time()
            self._append({"session": pid, "started": started, **where()})

    def uses(self, port: int) -> None:
        """A trial is about to use a port, whose number is in the names of its shared memory."""
        self._append({"port": port})

    def sweep(self, spare: Collection[int] = ()) -> list[int]:
        """Ends what is left of all that was recorded, and forgets it.

        Only for whoever holds the run's lock, and has ended its own supervisors.

        Args:
            spare: supervisors that go on, with all that they have started; then nothing is
                forgotten yet.

        Returns:
            The processes that it ended.
        """
        recorded = self._read()
        sessions = [entry for entry in recorded if "session" in entry]
        ended: set[int] = set()
        for _ in range(_ROUNDS):
            found = self._left_of(sessions, spare)
            if not found:
                break
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            ended |= found
            time.sleep(_PAUSE_S)
        if spare:
            return sorted(ended)
        for entry in recorded:
            if isinstance(entry.get("port"), int):
                unlink_shared_memory(entry["port"])
        with contextlib.suppress(OSError):  # of a folder that may have turned read-only
            self._path.unlink()
        return sorted(ended)

    def _left_of(self, sessions: list[dict[str, Any]], spare: Collection[int]) -> set[int]:
        here = where()
        alive = [entry for entry in sessions if here.items() <= entry.items()]
        known = {entry["session"]: entry["started"] for entry in alive if _is_same(entry)}
        own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents()), *spare}
        return {
            process.pid
            for process in psutil.process_iter()
            if process.pid not in own
            and self._is_ours(process, known)
            and not (spare and _is_below(process, spare))
        }

    def _is_ours(self, process: psutil.Process, sessions: Mapping[int, float]) -> bool:
        """Return whether a process belongs to the run.

        Its session or process group, its environment or its output files show it.
        """
        try:
            if process.status() == psutil.STATUS_ZOMBIE or process.uids().real != os.getuid():
                return False
            for leader in (os.getsid(process.pid), os.getpgid(process.pid)):
                if process.create_time() >= sessions.get(leader, float("inf")) - _CLOCK_SLACK_S:
                    return True
            variables = process.environ()
            outputs = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (1, 2)]
        except (psutil.Error, OSError):
            return False
        if variables.get(RUN_VARIABLE) == str(self._folder):
            return True
        trial = variables.get(_TRIAL_VARIABLE, "")
        logs = [path for path in outputs if _LOG.fullmatch(os.path.basename(path))]
        return any(path.startswith(f"{self._folder}{os.sep}") for path in (trial, *logs))

    def _append(self, entry: Mapping[str, Any]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, PRIVATE_FILE)
        try:
            os.write(descriptor, json.dumps(entry).encode() + b"\n")
        finally:
            os.close(descriptor)

    def _read(self) -> list[dict[str, Any]]:
        """Return the recorded entries without lines that a kill has torn."""
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    found.append(entry)
        return found


def where() -> dict[str, str]:
    """Return the scope of process IDs: this boot of this host or container."""
    found = {}
    with contextlib.suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        found["namespace"] = os.readlink("/proc/self/ns/pid")
    return found


def _is_below(process: psutil.Process, pids: Collection[int]) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(parent.pid in pids for parent in process.parents())
    return False


def _is_same(entry: Mapping[str, Any]) -> bool:
    """Return whether a session ID still belongs to the recorded session."""
    session, started = entry.get("session"), entry.get("started")
    if not isinstance(session, int) or not isinstance(started, (int, float)):
        return False
    try:
        return abs(psutil.Process(session).create_time() - started) <= _CLOCK_SLACK_S
    except psutil.Error:  # its leader has ended; its number is taken as long as the session lives
        return True


def unlink_shared_memory(port: int) -> None:
    """DeepSpeed's CPU backend never unlinks its buffers (csrc/cpu/comm/shm.cpp): 66 MiB a rank."""
    pattern = f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"  # noqa: S108
    for path in glob.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
