"""Clean-up after killed trials: processes, shared memory, swap folders, compiler locks."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.util
import logging
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
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
_OLD_S = 15 * 60.0  # a lock of this age no longer belongs to a running compiler
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


# -- processes


def end_processes(run: Path) -> list[int]:
    """Kill a run's processes on this machine, unlink its shared memory, and return the PIDs.

    The caller must hold the run's lock, and must have ended the run's supervisors.
    """
    run = run.resolve()
    ended_pids: set[int] = set()
    for _ in range(_ROUNDS):
        processes = _own_processes()
        pids = {p.pid for p, variables in processes if variables.get(RUN_VARIABLE) == str(run)}
        if not pids:
            break
        kill_all(pids)
        ended_pids |= pids
        time.sleep(_PAUSE_S)
    unlink_shared_memory(run / _PORTS_FILE)
    with contextlib.suppress(OSError):  # the folder may have become read-only
        (run / _PORTS_FILE).unlink(missing_ok=True)
    return sorted(ended_pids)


def kill_all(pids: Iterable[int]) -> None:
    """Kill processes; ignore ended processes and other users' processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def owner_mark() -> dict[str, str]:
    """Return an environment variable that marks processes as started by this process.

    Its value holds the PID and, since PIDs recur, the boot ID, PID namespace and creation time.
    """
    process = psutil.Process()
    return {OWNER_VARIABLE: f"{_place_of(process.pid)} {process.pid} {process.create_time()}"}


def end_orphans() -> list[int]:
    """Kill this PID namespace's processes that a dead dsat process started; return their PIDs."""
    ended_pids = set()
    for process, variables in _own_processes():
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            place, owner, created = variables.get(OWNER_VARIABLE, "").rsplit(" ", 2)
            # A PID of another namespace means nothing here.
            is_here = place == _place_of(os.getpid()) == _place_of(process.pid)
            if is_here and not _is_process(int(owner), float(created)):
                process.kill()
                ended_pids.add(process.pid)
    return sorted(ended_pids)


def _is_process(pid: int, created_s: float) -> bool:
    """Return whether the process with this PID and creation time still runs."""
    try:
        return abs(psutil.Process(pid).create_time() - created_s) < _SAME_TIME_S
    except psutil.NoSuchProcess:
        return False


def _place_of(pid: int) -> str:
    """Return the boot ID of this machine and the PID namespace of a process."""
    return f"{_BOOT_ID.read_text().strip()} {os.readlink(f'/proc/{pid}/ns/pid')}"


def _own_processes() -> Iterator[tuple[psutil.Process, Mapping[str, str]]]:
    """Yield processes and their environment variables, except this process and its ancestors.

    Processes whose variables this user cannot read are left out.
    """
    ancestors = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in ancestors and process.status() != psutil.STATUS_ZOMBIE:
                yield process, process.environ()


# -- shared memory


def note_port(run: Path, port: int) -> None:
    """Record a trial's port, so that `end_processes` can unlink its shared memory later."""
    with open(run / _PORTS_FILE, "a", encoding="ascii") as file:
        file.write(f"{port}\n")


def unlink_shared_memory(file: Path, *ports: int) -> None:
    """Unlink the shared memory, 66 MiB per rank, that DeepSpeed's CPU backend leaves behind.

    Its name contains the trial's port (csrc/cpu/comm/shm.cpp). `file` lists more ports, one a line.
    The file may be missing, or contain other text that a script wrote.
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
    """Return settings that give a trial a separate swap folder; empty without NVMe.

    DeepSpeed empties its swap folder when it starts, even if another trial uses the same folder
    (deepspeed 0.19.8, runtime/swap_tensor/partitioned_param_swapper.py).
    """
    # The name must be unique: runs of two projects, or on two hosts, may have equal names.
    place = f"{socket.gethostname()}:{run.resolve()}"
    name = f"dsat-{hashlib.sha256(os.fsencode(place)).hexdigest()[:12]}-{trial}"
    sections = {
        section: {**offload, "nvme_path": f"{offload.get('nvme_path', '/local_nvme')}/{name}"}
        for section, offload in _find_nvme_sections(config)
    }
    return {"zero_optimization": sections} if sections else {}


def swap_folders(config: Mapping[str, Any]) -> list[str]:
    """Return the folders that a configuration swaps to."""
    return list(dict.fromkeys(offload["nvme_path"] for _, offload in _find_nvme_sections(config)))


def _find_nvme_sections(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    zero = config.get("zero_optimization") or {}
    sections = [(section, zero.get(section)) for section in _OFFLOADED]
    return [(s, o) for s, o in sections if isinstance(o, dict) and o.get("device") == "nvme"]


# -- locks


class CompilerLocks:
    """Lock files that killed processes leave where DeepSpeed compiles operators.

    Older versions of torch hold a lock as long as the file exists (torch/utils/file_baton.py): if a
    compiling process is killed, all later ones wait for ever. Locks older than this object are
    kept: a process in a container, which is invisible here, may hold them.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._folder = _extensions_folder(env)
        self._first = self._times_ns()
        for path, made_ns in self._first.items():
            if time.time() - made_ns / 1e9 > _OLD_S and _torch_waits_for_files():
                _log.warning(
                    "trials wait for an old lock file. Delete %s, unless a process is still "
                    "compiling there",
                    path,
                )

    def remove(self) -> None:
        """Remove locks that are newer than this object and that no process holds."""
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


def _torch_waits_for_files() -> bool:
    """Return whether torch waits for a lock file's removal; newer versions lock the open file."""
    spec = importlib.util.find_spec("torch")
    folder = Path(str(spec.origin if spec else "")).parent
    with contextlib.suppress(OSError):
        return "FileBaton(" in (folder / "utils" / "cpp_extension.py").read_text(encoding="utf-8")
    return True


def _is_open(path: Path) -> bool:
    """Return whether a process has a lock file open, as torch does while it compiles."""
    target = os.path.realpath(path)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.path == target for file in process.open_files()):
                return True
    return False


def _extensions_folder(env: Mapping[str, str]) -> Path:
    """Return torch's folder for compiled operators (torch/utils/cpp_extension.py, _appdirs.py)."""
    folder = env.get("TORCH_EXTENSIONS_DIR")
    cache = env.get("XDG_CACHE_HOME", str(Path(env.get("HOME") or home()) / ".cache"))
    return Path(folder) if folder else Path(cache) / "torch_extensions"
