"""Leftovers of killed trials outside of their own folders."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OFFLOADED = ("offload_optimizer", "offload_param")
# A folder of operators may be on a disk of several hosts; compilers of them are long done then.
_NOBODYS_AFTER_S = 15 * 60.0
_OF_ONE_HOST = frozenset("bcachefs btrfs ext2 ext3 ext4 f2fs overlay ramfs tmpfs xfs zfs".split())


def with_own_swap_folder(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], list[Path]]:
    """A DeepSpeed configuration whose files on NVMe are in a folder of its own.

    DeepSpeed removes the folder that it swaps to when it starts (deepspeed 0.19.8,
    runtime/swap_tensor/partitioned_param_swapper.py), whoever else is using it.

    Returns:
        The configuration, and the folders, to be removed afterwards.
    """
    own: dict[str, Any] = copy.deepcopy(dict(config))
    folders = []
    zero = own.get("zero_optimization") or {}
    for section in _OFFLOADED:
        offload = zero.get(section)
        if isinstance(offload, dict) and offload.get("device") == "nvme":
            folder = Path(str(offload.get("nvme_path", "/local_nvme"))) / name
            zero[section] = {**offload, "nvme_path": str(folder)}  # both may be one object
            folders.append(folder)
    return own, folders


def make(folders: list[Path]) -> None:
    """Makes swap folders; where that fails, DeepSpeed's own message says more."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)


def remove(folders: list[Path]) -> None:
    """Remove swap folders."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def remove_compiler_locks(env: Mapping[str, str], *, since_s: float = math.inf) -> list[Path]:
    """Removes the locks that killed processes have left where DeepSpeed compiles its operators.

    torch's lock is a file that is there or not (torch/utils/file_baton.py): whoever comes later
    waits for ever for a process that was killed while it compiled.

    A lock that a living process of this host has open is left alone, and so is a young one in a
    folder that other hosts may share, whose processes are not seen.

    Args:
        env: of the processes that compile.
        since_s: locks that were made later, in seconds since the epoch, are of such as have ended.

    Returns:
        What was removed.
    """
    found = []
    folder = _extensions_folder(env)
    before_s = time.time() - _NOBODYS_AFTER_S if _may_be_shared(folder) else math.inf
    for path in sorted(folder.glob("**/lock")):
        with contextlib.suppress(OSError):
            made_s = path.stat().st_mtime
            if (made_s < before_s or made_s > since_s) and not _is_open(path):
                path.unlink()
                found.append(path)
    return found


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
    import psutil

    kinds = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    real = Path(os.path.realpath(folder))
    on = next((str(at) for at in (real, *real.parents) if str(at) in kinds), "")
    return kinds.get(on) not in _OF_ONE_HOST


def _extensions_folder(env: Mapping[str, str]) -> Path:
    """As torch finds it (torch/utils/cpp_extension.py, torch/_appdirs.py)."""
    given = env.get("TORCH_EXTENSIONS_DIR")
    cache = env.get("XDG_CACHE_HOME", str(Path(env.get("HOME") or Path.home()) / ".cache"))
    return Path(given) if given else Path(cache) / "torch_extensions"
