"""Imports in the supervisor, and checks that it can still fork ranks afterwards."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dsat.in_trial.adapters import install as adapters

# jemalloc, which pandas imports with pyarrow, stops this thread before a fork and restarts it
# afterwards (`background_thread_prefork0`).
_THREADS_THAT_MAY_FORK = frozenset({"jemalloc_bg_thd"})
_STARTED_THREADS = (
    "importing {modules} started threads, which prevents forking; a variable of the library may "
    "turn them off"
)
_PROBE_LIMIT_S = 60
_THREADS_END_WITHIN_S = 2.0


def warm_up(modules: Sequence[str], device: Mapping[str, str]) -> str:
    """Import modules; return why ranks cannot be forked afterwards, empty if they can be.

    Args:
        device: environment variables that limit a process to one device.
    """
    adapters.install()
    import numpy  # noqa: F401

    # Older torch starts inductor's workers when imported (`_inductor/async_compile.py`, 2.7.1).
    os.environ["TORCH_WARM_POOL"] = "0"  # ranks do not inherit this variable
    # OpenBLAS starts its threads when numpy is imported, and ends them itself before a fork.
    threads_before = count = _num_threads()
    starters: dict[threading.Thread, str] = {}  # the importing module of each Python thread
    natives: list[str] = []  # modules whose imports increased the number of threads
    python_class: Any = threading.Thread
    start = python_class.start

    def start_noted(thread: threading.Thread) -> None:
        starters[thread] = _importing_module()
        start(thread)

    python_class.start = start_noted
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # a user's library may do anything
            sys.stderr.write(f"{name} cannot be imported in advance: {error!r}\n")
        previous, count = count, _num_threads()
        natives += [name] if count > previous else []
    python_class.start = start
    reason = ""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        reason = "an import initialised CUDA"
    elif not _threads_end(threads_before):
        live_modules = [module for thread, module in starters.items() if thread.is_alive()]
        names = filter(None, live_modules or natives)
        reason = _STARTED_THREADS.format(modules=", ".join(dict.fromkeys(names)) or "a library")
    else:
        reason = _check_fork_safe(os.environ.get("DS_ACCELERATOR", "cpu"), device)
    if not reason:
        gc.collect()
        gc.freeze()  # forked ranks then share these objects instead of copying them
    return reason


def _importing_module() -> str:
    """Return the name of the innermost module that is being imported; empty if none is."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def _check_fork_safe(accelerator: str, device: Mapping[str, str]) -> str:
    """Return why a forked process cannot use a device; empty if it can, or on a CPU.

    An import can silently make it impossible, for example by asking for the number of devices.
    """
    if accelerator == "cpu" or "torch" not in sys.modules:
        return ""
    pid = os.fork()
    if pid == 0:
        _probe_device(accelerator, device)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        return ""
    return f"after the imports, a forked process cannot use {accelerator} (status {status})"


def _probe_device(accelerator: str, device: Mapping[str, str]) -> NoReturn:
    signal.alarm(_PROBE_LIMIT_S)  # ends this process if it hangs
    status = 1
    try:
        os.environ.update(device)
        import torch

        torch.empty(1, device=accelerator)
        status = 0
    except Exception as error:
        status = int("out of memory" not in str(error))  # a full device can be used after a fork
        sys.stderr.write(f"no device in a forked process: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(status)


def _threads_end(threads_before: int) -> bool:
    """Wait for additional threads to end; return whether they did."""
    deadline = time.monotonic() + _THREADS_END_WITHIN_S
    while _num_threads() > threads_before:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _num_threads() -> int:
    """Count the threads of this process, except those that stop around a fork."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text().strip()
            count += name not in _THREADS_THAT_MAY_FORK
    return count
