"""Leftovers of killed trials: processes, shared memory, swap folders, locks of compilers."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from dsat.in_trial.hook import OWNER_VARIABLE, RUN_VARIABLE
from dsat.values.files import home

_log = logging.getLogger(__name__)
_PORTS_FILE = "used-ports"
_SAME_TIME_S = 1.0
_ROUNDS, _PAUSE_S = 200, 0.02
_OFFLOADED = ("offload_optimizer", "offload_param")
_OLD_S = 15 * 60.0  # of a lock, whose compiler is long done
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


# -- processes


def end_processes(run: Path) -> list[int]:
    """End processes of a run on this machine, and return them.

    The caller holds the run's lock, and has ended its own supervisors.
    """
    run = run.resolve()
    ended: set[int] = set()
    for _ in range(_ROUNDS):
        processes = _own_processes()
        found = {p.pid for p, variables in processes if variables.get(RUN_VARIABLE) == str(run)}
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended |= found
        time.sleep(_PAUSE_S)
    unlink_shared_memory(run / _PORTS_FILE)
    with contextlib.suppress(OSError):  # the folder has turned read-only
        (run / _PORTS_FILE).unlink(missing_ok=True)
    return sorted(ended)


def owner_mark() -> dict[str, str]:
    """Return the variable that names this process in all processes that dsat starts.

    It includes where the process number counts: boot of the machine, and PID namespace.
    """
    process = psutil.Process()
    return {OWNER_VARIABLE: f"{_place_of(process.pid)} {process.pid} {process.create_time()}"}


def end_orphans() -> list[int]:
    """End processes that a dead dsat on this machine started; return them."""
    ended = set()
    for process, variables in _own_processes():
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            place, owner, created = variables.get(OWNER_VARIABLE, "").rsplit(" ", 2)
            # Numbers in another namespace say nothing here.
            is_here = place == _place_of(os.getpid()) == _place_of(process.pid)
            if is_here and not _is_process(int(owner), float(created)):
                process.kill()
                ended.add(process.pid)
    return sorted(ended)


def _is_process(pid: int, created_s: float) -> bool:
    """Return whether the process that began at a time still runs."""
    try:
        return abs(psutil.Process(pid).create_time() - created_s) < _SAME_TIME_S
    except psutil.NoSuchProcess:
        return False


def _place_of(pid: int) -> str:
    """Return the boot and the PID namespace of a process."""
    return f"{_BOOT_ID.read_text().strip()} {os.readlink(f'/proc/{pid}/ns/pid')}"


def _own_processes() -> Iterator[tuple[psutil.Process, Mapping[str, str]]]:
    """Yield this user's processes with their variables, except this one and its ancestors."""
    above = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in above and process.status() != psutil.STATUS_ZOMBIE:
                yield process, process.environ()


# -- shared memory


def note_port(run: Path, port: int) -> None:
    """Note a port of a trial, for `end_processes` of a later process."""
    with open(run / _PORTS_FILE, "a", encoding="ascii") as file:
        file.write(f"{port}\n")


def unlink_shared_memory(file: Path, *ports: int) -> None:
    """Remove buffers of 66 MiB per rank that DeepSpeed's CPU backend never unlinks.

    Their names contain the trial's port (csrc/cpu/comm/shm.cpp). Ports are read from the lines of
    `file`, which may be missing and which scripts may write to.
    """
    lines = [str(port) for port in ports]
    with contextlib.suppress(OSError, ValueError):
        lines += file.read_text().splitlines()
    for port in filter(str.isdigit, lines):
        pattern = f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"  # noqa: S108
        for path in glob.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


# -- swap folders


def choose_swap_folders(config: Mapping[str, Any], run: Path, trial: str) -> dict[str, Any]:
    """Return settings that make a DeepSpeed configuration swap to a folder of the trial's own.

    DeepSpeed empties its swap folder when it starts, although other trials may use it (deepspeed
    0.19.8, runtime/swap_tensor/partitioned_param_swapper.py).
    """
    # Folders of runs may have the same name in two projects.
    place = f"{socket.gethostname()}:{run.resolve()}"
    name = f"dsat-{hashlib.sha256(place.encode()).hexdigest()[:12]}-{trial}"
    found = {
        section: {**offload, "nvme_path": f"{offload.get('nvme_path', '/local_nvme')}/{name}"}
        for section, offload in _find_nvme_sections(config)
    }
    return {"zero_optimization": found} if found else {}


def swap_folders(config: Mapping[str, Any]) -> list[str]:
    """Return the folders that a configuration swaps to."""
    return list(dict.fromkeys(offload["nvme_path"] for _, offload in _find_nvme_sections(config)))


def _find_nvme_sections(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    zero = config.get("zero_optimization") or {}
    found = [(section, zero.get(section)) for section in _OFFLOADED]
    return [(s, o) for s, o in found if isinstance(o, dict) and o.get("device") == "nvme"]


# -- locks


class CompilerLocks:
    """Locks that killed processes left where DeepSpeed compiles operators.

    torch's lock is a file that exists or not (torch/utils/file_baton.py): all later processes wait
    for ever for one that was killed while it compiled. A lock that was there before this began may
    be of another user or container, whose processes cannot be seen.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._folder = _extensions_folder(env)
        self._first = self._times_ns()
        for path, made_ns in self._first.items():
            if time.time() - made_ns / 1e9 > _OLD_S:
                _log.warning(
                    "trials wait for the lock %s, which an earlier process has left: remove it, "
                    "unless something compiles there",
                    path,
                )

    def remove(self) -> None:
        """Remove locks that were made since this object, by processes that have ended."""
        for path, made_ns in self._times_ns().items():
            if made_ns != self._first.get(path) and not _is_open(path):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _times_ns(self) -> dict[Path, int]:
        times = {}
        for path in sorted(self._folder.glob("**/lock")):
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_uid == os.getuid():
                    times[path] = status.st_mtime_ns
        return times


def _is_open(path: Path) -> bool:
    """Return whether a living process holds a lock, which torch keeps open while it compiles."""
    target = os.path.realpath(path)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.path == target for file in process.open_files()):
                return True
    return False


def _extensions_folder(env: Mapping[str, str]) -> Path:
    """Folder of compiled operators (torch/utils/cpp_extension.py, torch/_appdirs.py)."""
    given = env.get("TORCH_EXTENSIONS_DIR")
    cache = env.get("XDG_CACHE_HOME", str(Path(env.get("HOME") or home()) / ".cache"))
    return Path(given) if given else Path(cache) / "torch_extensions"
