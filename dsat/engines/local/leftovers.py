"""What a trial that is killed would leave to the next one, outside of its own folder."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OFFLOADED = ("offload_optimizer", "offload_param")


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
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def remove_compiler_locks(env: Mapping[str, str]) -> list[Path]:
    """Removes the locks that killed processes have left where DeepSpeed compiles its operators.

    torch's lock is a file that is there or not (torch/utils/file_baton.py): whoever comes later
    waits for ever for a process that was killed while it compiled.

    A lock that a living process has open is left alone.

    Args:
        env: of the processes that compile.

    Returns:
        What was removed.
    """
    found = []
    for path in sorted(_extensions_folder(env).glob("**/lock")):
        with contextlib.suppress(OSError):
            if not _is_open(path):
                path.unlink()
                found.append(path)
    return found


def _is_open(path: Path) -> bool:
    """Whether a living process holds a lock, which torch keeps open while it compiles."""
    target = os.path.realpath(path)
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.path.realpath(fd) == target for fd in descriptors.iterdir()):
                return True
    return False


def _extensions_folder(env: Mapping[str, str]) -> Path:
    given = env.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else Path.home() / ".cache" / "torch_extensions"
