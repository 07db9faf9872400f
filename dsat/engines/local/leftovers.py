"""Leftovers of killed trials: processes, shared memory, swap folders, locks of compilers."""

from __future__ import annotations

import contextlib
import copy
import glob
import hashlib
import math
import os
import shutil
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from dsat.in_trial.hook import TRIAL_VARIABLE
from dsat.values.files import home

# In the environment of supervisors, and so of all that they fork.
RUN_VARIABLE = "DSAT_RUN_DIR"
_PORTS_FILE = "used-ports"
_ROUNDS, _PAUSE_S = 200, 0.02
_OFFLOADED = ("offload_optimizer", "offload_param")
# A folder of operators may be on a disk of several hosts; compilers of them are long done then.
_ABANDONED_AFTER_S = 15 * 60.0
_OF_ONE_HOST = frozenset("bcachefs btrfs ext2 ext3 ext4 f2fs overlay ramfs tmpfs xfs zfs".split())


# -- processes


def end_processes(run: Path) -> list[int]:
    """End processes of a run on this machine, and return them.

    Only for the process that holds the run's lock, and has ended its own supervisors.

    Args:
        run: folder of the run.
    """
    run = run.resolve()
    ended: set[int] = set()
    for _ in range(_ROUNDS):
        found = _processes_of(run)
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


def _processes_of(run: Path) -> set[int]:
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid in own or process.status() == psutil.STATUS_ZOMBIE:
                continue
            variables = process.environ()
            trial = variables.get(TRIAL_VARIABLE, "")  # the run itself, of a first run
            is_below = trial == str(run) or trial.startswith(f"{run}{os.sep}")
            if is_below or variables.get(RUN_VARIABLE) == str(run):
                found.add(process.pid)
    return found


# -- shared memory


def note_port(run: Path, port: int) -> None:
    """Note a port that a trial is about to use, for `end_processes` of a later process."""
    with open(run / _PORTS_FILE, "a", encoding="ascii") as file:
        file.write(f"{port}\n")


def unlink_shared_memory(file: Path, *ports: int) -> None:
    """Remove buffers that DeepSpeed's CPU backend never unlinks: 66 MiB a rank.

    The port of a trial is in their names (csrc/cpu/comm/shm.cpp).

    Args:
        file: with a port in each line; it may be missing, and scripts may write to it.
        ports: further ones.
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


def with_own_swap_folder(config: Mapping[str, Any], run: Path, trial: str) -> dict[str, Any]:
    """Return a DeepSpeed configuration that swaps to a folder of the trial's own.

    DeepSpeed removes the folder that it swaps to when it starts (deepspeed 0.19.8,
    runtime/swap_tensor/partitioned_param_swapper.py), although other trials may be using it.
    """
    own: dict[str, Any] = copy.deepcopy(dict(config))
    # Folders of runs may have the same name in two projects.
    place = f"{socket.gethostname()}:{run.resolve()}"
    name = f"dsat-{hashlib.sha256(place.encode()).hexdigest()[:12]}-{trial}"
    for section, offload in _on_nvme(own):
        folder = Path(str(offload.get("nvme_path", "/local_nvme"))) / name
        # Both sections may be one object.
        own["zero_optimization"][section] = {**offload, "nvme_path": str(folder)}
    return own


def swap_folders(config: Mapping[str, Any]) -> list[str]:
    """Return the folders that a configuration swaps to."""
    return list(dict.fromkeys(offload["nvme_path"] for _, offload in _on_nvme(config)))


def _on_nvme(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the sections that offload to NVMe."""
    zero = config.get("zero_optimization") or {}
    found = [(section, zero.get(section)) for section in _OFFLOADED]
    return [(s, o) for s, o in found if isinstance(o, dict) and o.get("device") == "nvme"]


def make_folders(folders: Sequence[str]) -> list[Path]:
    """Make swap folders on this host; return those that were not there before."""
    made = []
    for folder in map(Path, folders):
        with contextlib.suppress(OSError):  # DeepSpeed's own message says more
            folder.mkdir(parents=True)
            made.append(folder)
    return made


def remove_folders(folders: Sequence[Path]) -> None:
    """Remove swap folders."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


# -- locks


class CompilerLocks:
    """Locks that killed processes left where DeepSpeed compiles operators.

    torch's lock is a file that exists or not (torch/utils/file_baton.py): all later processes wait
    for ever for one that was killed while it compiled. A lock that a living process of this host
    has open stays, and so does a young one in a folder that other hosts may share.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._folder = _extensions_folder(env)
        self._first = self._times_ns()

    def remove(self, *, own: bool = False) -> None:
        """Remove abandoned locks.

        Args:
            own: locks that were made since this began belong to ended processes.
        """
        before_s = time.time() - _ABANDONED_AFTER_S if _may_be_shared(self._folder) else math.inf
        for path, made_ns in self._times_ns().items():
            is_own = own and made_ns != self._first.get(path)
            if (is_own or made_ns < before_s * 1e9) and not _is_open(path):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _times_ns(self) -> dict[Path, int]:
        """Return when each lock was made, by the clock of its file system."""
        times = {}
        for path in sorted(self._folder.glob("**/lock")):
            with contextlib.suppress(OSError):
                times[path] = path.stat().st_mtime_ns
        return times


def _is_open(path: Path) -> bool:
    """Return whether a living process holds a lock, which torch keeps open while it compiles."""
    target = os.path.realpath(path)
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.path.realpath(fd) == target for fd in descriptors.iterdir()):
                return True
    return False


def _may_be_shared(folder: Path) -> bool:
    """Return whether other hosts may share a folder: it is on none of the usual local disks."""
    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    real = Path(os.path.realpath(folder))
    on = next((str(at) for at in (real, *real.parents) if str(at) in kinds), "")
    return kinds.get(on) not in _OF_ONE_HOST


def _extensions_folder(env: Mapping[str, str]) -> Path:
    """Folder of compiled operators (torch/utils/cpp_extension.py, torch/_appdirs.py)."""
    given = env.get("TORCH_EXTENSIONS_DIR")
    cache = env.get("XDG_CACHE_HOME", str(Path(env.get("HOME") or home()) / ".cache"))
    return Path(given) if given else Path(cache) / "torch_extensions"
