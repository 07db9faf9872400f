"""Forked child of the supervisor that becomes a rank."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dsat.in_trial.hook import RANK_VARIABLE

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Signals that are for dsat: a terminal's, and those that Slurm sends before and at a time limit.
FOR_DSAT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def become_rank(
    request: Mapping[str, Any],
    rank: Mapping[str, Any],
    leader: int,
    parent: int,
    descriptors: Sequence[int],
) -> NoReturn:
    """Run a rank in this process.

    Args:
        request: to launch a trial; see `dsat.engines.agent.supervisor`.
        leader: process group of the trial; 0 for a new one.
    """
    status = 1
    try:
        os.setpgid(0, leader)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could be watched
            os._exit(status)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *FOR_DSAT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes have Ctrl-C blocked
        for descriptor in descriptors:
            os.close(descriptor)
        folder = Path(request["folder"])
        for descriptor, name in zip((1, 2), request["logs"], strict=True):
            log = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, descriptor)
            os.close(log)
        # If the host runs out of memory, it should end a trial rather than the tuner.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
        os.chdir(request["cwd"])
        if rank["cores"]:
            os.sched_setaffinity(0, rank["cores"])
        if not request["fork"]:
            own = {RANK_VARIABLE: str(os.getpid())} if request["starts_ranks"] else {}
            _execute(rank["command"], {**rank["env"], **own})
        for name in set(os.environ) - set(rank["env"]):
            del os.environ[name]
        os.environ.update(rank["env"])
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        from dsat.in_trial import rank as rank_module

        rank_module.run_forked(folder, rank["command"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _execute(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process by a program, as a shell would."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(command[0], list(command), env)  # noqa: S606
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        os.execve("/bin/sh", ["sh", *command], env)  # noqa: S606  # a script that names no shell
