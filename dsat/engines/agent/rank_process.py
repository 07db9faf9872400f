"""Forked child of the supervisor, which becomes a rank or the user's command."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import os
import random
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dsat.command.entrypoint import split_interpreter
from dsat.in_trial.hook import RANK_VARIABLE

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Signals meant for dsat itself: from a terminal, and from Slurm before and at a time limit.
FOR_DSAT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process (`man prctl`)."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def become_rank(
    request: Mapping[str, Any],
    rank: Mapping[str, Any],
    leader: int,
    parent: int,
    descriptors: Sequence[int],
) -> NoReturn:
    """Turn this process into a rank or the user's command.

    Args:
        request: a launch request (`dsat.engines.agent.supervisor`).
        rank: the element of the request's `ranks` to start.
        leader: process group of the trial; 0 for a new one.
        parent: PID of the supervisor.
        descriptors: file descriptors of the supervisor to close.
    """
    status = 1
    try:
        os.setpgid(0, leader)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the supervisor died before PR_SET_PDEATHSIG took effect
            os._exit(status)
        for number in FOR_DSAT:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes block SIGINT
        for descriptor in descriptors:
            os.close(descriptor)
        folder = Path(request["folder"])
        for descriptor, name in zip((1, 2), request["logs"], strict=True):
            log = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, descriptor)
            os.close(log)
        # If the host runs out of memory, the kernel should kill a trial rather than the tuner.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
        os.chdir(request["cwd"])
        if rank["cores"]:
            os.sched_setaffinity(0, rank["cores"])
        mark = {RANK_VARIABLE: str(os.getpid())} if request["starts_ranks"] else {}
        env = {**rank["env"], **mark}
        if not request["fork"]:
            _execute(rank["command"], env)
        for name in set(os.environ) - set(env):
            del os.environ[name]
        os.environ.update(env)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        _run_forked(folder, rank["command"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def _execute(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process with a program, as a shell would."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(command[0], list(command), env)  # noqa: S606
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        os.execve("/bin/sh", ["sh", *command], env)  # noqa: S606  # a script without a #! line


def _run_forked(folder: Path, command: Sequence[str]) -> NoReturn:
    """Run a Python command in this fork of the supervisor."""
    import numpy

    from dsat.in_trial import rank as rank_module
    from dsat.in_trial.adapters import install

    rank = rank_module.get_rank(folder, is_forked=True)
    try:
        # Forks inherit the parent's random state, but each fresh process would have another one.
        random.seed()
        numpy.random.seed()
        install.begin(folder)
        rank.prepare()
        _run_program(split_interpreter(command[1:])[1])
    except BaseException as error:
        rank.fail(error)
    rank.finish()
    # A full-length run ends as every Python program does: join threads, call atexit functions.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    rank_module.leave(0)


def _run_program(words: Sequence[str]) -> None:
    """Run a script, or `-m` and a module, with its arguments."""
    if words[0] == "-m":
        if not os.environ.get("PYTHONSAFEPATH"):
            sys.path.insert(0, os.getcwd())
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        # Make `__file__` absolute, as Python does: a script may change its folder, or spawn itself.
        script = os.path.abspath(words[0])
        # Python finds modules beside the real file; if the script is a link, also look beside it.
        folders = dict.fromkeys(map(os.path.dirname, (os.path.realpath(script), script)))
        sys.path[:0] = list(folders)
        sys.argv = list(words)
        runpy.run_path(script, run_name="__main__")
