"""Imports in the supervisor, and checks that it can still fork ranks afterwards."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

# jemalloc's own handlers restart it after a fork (`background_thread_prefork0`); pyarrow, which
# pandas imports, brings it.
_THREADS_THAT_MAY_FORK = frozenset({"jemalloc_bg_thd"})
_PROBE_LIMIT_S = 60.0
_THREADS_END_WITHIN_S = 2.0
_DEVICE_IS_FULL = 3


def warm_up(modules: Sequence[str], device: Mapping[str, str] | None) -> dict[str, Any]:
    """Import modules; return whether the process can still fork ranks, and a reason if not.

    Args:
        modules: to import.
        device: variables by which a process sees a device that works; None without one.
    """
    import numpy  # noqa: F401

    # Older torch starts inductor's workers at its import (`_inductor/async_compile.py` of 2.7.1).
    os.environ["TORCH_WARM_POOL"] = "0"  # ranks have variables of their own
    # OpenBLAS starts its threads when numpy is imported, and ends them itself before a fork.
    threads_before = _num_threads()
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # a user's library may do anything
            sys.stderr.write(f"{name} cannot be imported in advance: {error!r}\n")
    reason = ""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        reason = "an import initialised CUDA"
    elif not _threads_end(threads_before):
        reason = "an import started threads"
    else:
        reason = _check_fork_safe(os.environ.get("DS_ACCELERATOR", "cpu"), device)
    if not reason:
        gc.collect()
        gc.freeze()  # forked ranks then share these objects instead of copying them
    return {"ok": not reason, "reason": reason}


def _check_fork_safe(accelerator: str, device: Mapping[str, str] | None) -> str:
    """Return why a forked process cannot use a device that works; empty if it can.

    An import may spoil it unseen: asking for the number of devices is enough.
    """
    if accelerator == "cpu" or device is None or "torch" not in sys.modules:
        return ""
    pid = os.fork()
    if pid == 0:
        _probe_device(accelerator, device)
    deadline = time.monotonic() + _PROBE_LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(status)
            if status in (0, _DEVICE_IS_FULL):  # a full device says nothing of forks
                return ""
            return f"after the imports, a forked process cannot use {accelerator} (status {status})"
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return f"a forked process that uses {accelerator} does not come back"


def _probe_device(accelerator: str, device: Mapping[str, str]) -> NoReturn:
    status = 1
    try:
        os.environ.update(device)
        import torch

        torch.empty(1, device=accelerator)
        status = 0
    except Exception as error:
        full = type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error)
        status = _DEVICE_IS_FULL if full else 1
        sys.stderr.write(f"no device in a forked process: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(status)


def _threads_end(threads_before: int) -> bool:
    """Return whether there are soon no more threads than before."""
    deadline = time.monotonic() + _THREADS_END_WITHIN_S
    while _num_threads() > threads_before:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _num_threads() -> int:
    """Count the threads of this process, without those that end and begin again around a fork."""
    tasks = Path("/proc/self/task")
    count = 0
    for task in tasks.iterdir() if tasks.is_dir() else [tasks]:
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text().strip()
            count += name not in _THREADS_THAT_MAY_FORK
    return max(1, count)
