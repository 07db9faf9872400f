"""The process that starts and ends the ranks of all trials.

    python3 -m dsat.engines.local.supervisor

It takes requests as JSON lines on its standard input and answers on its standard output. Once it is
told to warm up, it imports torch and DeepSpeed and forks ranks that have them already; it must then
do nothing that starts a thread or touches a device, because a process in which that happened cannot
fork. Without it, a rank is a fresh Python process.

No process of a trial outlives its trial or this process, and this process ends as soon as its
standard input does: whoever started it may be killed at any time.

Requests:
    {"op": "warm", "modules": [...],
     "device": variables by which a process sees one that works, or null if none does}
    {"op": "launch", "trial": id, "folder": path, "cwd": path, "port": n,
     "command": [...] or null (fork), "ranks": [{"env": {...}, "cores": [...]}],
     "logs": [name, name] of what they print to standard output and standard error,
     "linger_s": how long ranks may go on after one has ended well, or null,
     "done": if given, the name of a file in the folder: the trial is ended once it is there,
     "ports": if given, the name of a file in the folder: more ports that ranks use, a line each}
    {"op": "kill", "trial": id, "grace_s": seconds in which it may end by itself}
    {"op": "look", "path": path}
    {"op": "ping", "limit_s": if given, this process ends with all that it started when trials run
     and no further ping comes for so long: it is cut off}
Answers:
    {"event": "warm", "ok": bool, "reason": text}
    {"event": "look", "text": what is in the file, or null, "is_folder": bool,
     "pid": of this process, "where": the host on which that is its number}
    {"event": "pong"}
    {"event": "ended", "trial": id, "statuses": [exit status or -signal by rank],
     "killed": [whether this process killed it, by rank],
     "stuck": [whether it could not be killed, by rank: it waits in the kernel, for a driver
      perhaps]}
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dsat.engines.local.heartbeats import ListeningClock
from dsat.engines.local.process_record import unlink_shared_memory, where

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# A rank that sees another one fail ends by itself soon; its own report may say more.
GRACE_AFTER_FAILURE_S = 0.3
# A killed process ends when its last call into the kernel returns; that of a driver may never.
_STUCK_AFTER_S = 60.0
# jemalloc's own handlers see to it (`background_thread_prefork0`); pyarrow, which pandas imports,
# brings it.
_THREADS_THAT_MAY_FORK = frozenset({"jemalloc_bg_thd"})
_CANARY_LIMIT_S = 60.0
_THREADS_END_WITHIN_S = 2.0
_CANARY_IS_FULL = 3
_LOOK_AROUND_EVERY_S = 30.0
_LOOK_FOR_FILES_EVERY_S = 0.05


@dataclass
class _Group:
    """The ranks of one trial."""

    trial: int
    folder: str
    port: int
    linger_s: float | None
    done: Path | None = None
    ports: Path | None = None
    pids: list[int] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    killed_ranks: set[int] = field(default_factory=set)
    killed: bool = False
    kill_at: float | None = None
    killed_at: float | None = None
    descendants: set[int] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        return len(self.statuses) == len(self.pids)


class Supervisor:
    """The event loop. Single-threaded on purpose."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._selector = selectors.DefaultSelector()
        self._buffer = b""
        self._clock = ListeningClock(_LOOK_AROUND_EVERY_S)
        self._forsaken_at_s: float | None = None
        # The protocol gets descriptors of its own, so that nothing a library prints can break it.
        self._requests = os.dup(0)
        self._answers = os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)
        self._wakeup, wakeup_write = os.pipe()
        for descriptor in (self._wakeup, wakeup_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The terminal's Ctrl-C, and the SIGTERM at the end of a Slurm allocation, are for whoever
        # started this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._selector.register(self._requests, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def run(self) -> None:
        """Serves until the standard input ends, or is cut off; then kills what runs."""
        try:
            while True:
                for key, _ in self._selector.select(self._timeout_s()):
                    if key.fd == self._wakeup:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wakeup, 4096)
                    elif not self._read_requests():
                        return
                self._reap()
                self._kill_overdue()
                # Whoever was stopped finds the time over before it has read what was said since.
                if self._is_forsaken() and not self._selector.select(0):
                    return
        finally:
            for group in list(self._groups.values()):
                self._kill(group)
            _kill_everything_below()
            for group in self._groups.values():
                _unlink_shared_memory(group)

    # -- requests

    def _read_requests(self) -> bool:
        chunk = os.read(self._requests, 65536)
        if not chunk:
            return False
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        return True

    def _handle(self, request: Mapping[str, Any]) -> None:
        op = request["op"]
        if op == "warm":
            with _dying_with_its_parent():
                found = _warm_up(request["modules"], request["device"])
            self._answer({"event": "warm", **found})
        elif op == "launch":
            self._launch(request)
        elif op == "kill":
            group = self._groups.get(request["trial"])
            if group is not None and not group.ended:
                self._end(group, request.get("grace_s", 0.0))
        elif op == "look":
            path = Path(request["path"])
            seen = {"text": _text(path), "is_folder": path.is_dir()}
            self._answer({"event": "look", **seen, "pid": os.getpid(), "where": where()})
        elif op == "ping":
            limit_s = request["limit_s"]
            self._forsaken_at_s = None if limit_s is None else self._clock.now_s() + limit_s
            self._answer({"event": "pong"})

    def _answer(self, message: Mapping[str, Any]) -> None:
        # Whoever reads the answers is gone: the requests end as well, and with them this process.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._answers, json.dumps(message).encode() + b"\n")

    # -- processes

    def _launch(self, request: Mapping[str, Any]) -> None:
        group = _Group(request["trial"], request["folder"], request["port"], request["linger_s"])
        if request.get("done"):
            group.done = Path(group.folder) / request["done"]
        if request.get("ports"):
            group.ports = Path(group.folder) / request["ports"]
        self._groups[group.trial] = group
        sys.stdout.flush()
        sys.stderr.flush()
        own_pid = os.getpid()
        for rank in request["ranks"]:
            leader = group.pids[0] if group.pids else 0
            pid = os.fork()
            if pid == 0:
                self._become_rank(request, rank, leader, own_pid)
            with contextlib.suppress(OSError):  # the child did it first, or is gone
                os.setpgid(pid, leader or pid)
            group.pids.append(pid)

    def _become_rank(
        self, request: Mapping[str, Any], rank: Mapping[str, Any], leader: int, parent: int
    ) -> NoReturn:
        status = 1
        try:
            os.setpgid(0, leader)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before it could be watched
                os._exit(status)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            for descriptor in (self._requests, self._answers, self._wakeup):
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
            if request["command"] is not None:
                os.execve(request["command"][0], request["command"], rank["env"])  # noqa: S606
            for name in set(os.environ) - set(rank["env"]):
                del os.environ[name]
            os.environ.update(rank["env"])
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            from dsat.in_trial import rank as rank_module

            rank_module.run(folder)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for group in self._groups.values():
                if pid in group.pids:
                    self._note_end(group, group.pids.index(pid), os.waitstatus_to_exitcode(status))
                    break

    def _note_end(self, group: _Group, rank: int, status: int) -> None:
        group.statuses[rank] = status
        if not group.ended:
            grace_s = group.linger_s if status == 0 else GRACE_AFTER_FAILURE_S
            if grace_s is not None:
                self._end(group, grace_s)
            return
        self._finish(group)

    def _finish(self, group: _Group) -> None:
        """Tells that a trial has ended; ranks of it without a status by now are stuck."""
        del self._groups[group.trial]
        _kill_all(group.pids[0], group.descendants | self._strays(group))
        _unlink_shared_memory(group)
        self._answer(
            {
                "event": "ended",
                "trial": group.trial,
                "statuses": [
                    group.statuses.get(rank, -signal.SIGKILL) for rank in range(len(group.pids))
                ],
                "killed": [rank in group.killed_ranks for rank in range(len(group.pids))],
                "stuck": [rank not in group.statuses for rank in range(len(group.pids))],
            }
        )
        if not self._groups and group.ended:
            _kill_everything_below()

    def _end(self, group: _Group, grace_s: float) -> None:
        """Kills a trial after a grace, in which it may end by itself."""
        if grace_s <= 0:
            self._kill(group)
            return
        deadline = time.monotonic() + grace_s
        if group.kill_at is None or deadline < group.kill_at:
            group.kill_at = deadline

    def _kill_overdue(self) -> None:
        for group in self._groups.values():
            if group.done is not None and group.done.exists():
                group.done = None
                self._end(group, GRACE_AFTER_FAILURE_S)
        now = time.monotonic()
        for group in self._groups.values():
            if group.kill_at is not None and group.kill_at <= now and not group.killed:
                self._kill(group)
        for group in list(self._groups.values()):
            if group.killed_at is not None and now - group.killed_at >= _STUCK_AFTER_S:
                self._finish(group)

    def _kill(self, group: _Group) -> None:
        group.killed = True
        group.killed_at = time.monotonic()
        group.killed_ranks = set(range(len(group.pids))) - group.statuses.keys()
        group.descendants |= _descendants(group.pids[rank] for rank in group.killed_ranks)
        _kill_all(group.pids[0], group.descendants)

    def _strays(self, ended: _Group) -> set[int]:
        """What an ended trial started and left to this process, while other trials go on."""
        ranks = {pid for group in self._groups.values() for pid in group.pids}
        adopted = _descendants([os.getpid()], recursive=False) - ranks
        strays = {pid for pid in adopted if _started_by(pid, ended.folder)}
        return strays | _descendants(strays)

    def _is_forsaken(self) -> bool:
        """Whether trials run that nobody seems to wait for any more."""
        now_s, at_s = self._clock.now_s(), self._forsaken_at_s
        return bool(self._groups) and at_s is not None and now_s >= at_s

    def _timeout_s(self) -> float | None:
        groups = self._groups.values()
        deadlines = [g.kill_at for g in groups if g.kill_at and not g.killed]
        deadlines += [g.killed_at + _STUCK_AFTER_S for g in groups if g.killed_at is not None]
        left = [max(0.0, min(deadlines) - time.monotonic())] if deadlines else []
        left += [_LOOK_FOR_FILES_EVERY_S for group in groups if group.done is not None]
        if self._groups and self._forsaken_at_s is not None:
            left_s = max(0.0, self._forsaken_at_s - self._clock.now_s())
            left.append(min(left_s, _LOOK_AROUND_EVERY_S))
        return min(left, default=None)


def _warm_up(modules: Sequence[str], device: Mapping[str, str] | None) -> dict[str, Any]:
    """Imports modules; says whether the process can still fork ranks.

    Args:
        modules: what to import.
        device: variables by which a process sees one that works; None if there is none to try.
    """
    import numpy  # noqa: F401

    # OpenBLAS starts its threads when numpy is imported, and ends them itself before a fork.
    threads_before = _num_threads()
    with _without_compile_workers():
        for name in modules:
            try:
                importlib.import_module(name)
            except (
                Exception,
                SystemExit,
            ) as error:  # a user's library may do anything
                sys.stderr.write(f"{name} cannot be imported in advance: {error!r}\n")
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():
            return {"ok": False, "reason": "an import initialised CUDA"}
    if not _threads_end(threads_before):
        return {"ok": False, "reason": "an import started threads"}
    if problem := _canary(os.environ.get("DS_ACCELERATOR", "cpu"), device):
        return {"ok": False, "reason": problem}
    gc.collect()
    gc.freeze()  # forked ranks then share these objects instead of copying them
    return {"ok": True, "reason": ""}


def _canary(accelerator: str, device: Mapping[str, str] | None) -> str:
    """Why a forked process cannot use a device that works, if it cannot.

    Asking how many devices there are is enough to spoil it, and an import may do that unseen.
    """
    if accelerator == "cpu" or device is None or "torch" not in sys.modules:
        return ""
    pid = os.fork()
    if pid == 0:
        _sing(accelerator, device)
    deadline = time.monotonic() + _CANARY_LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(status)
            if status in (0, _CANARY_IS_FULL):  # that it is full says nothing of forks
                return ""
            return f"after the imports, a forked process cannot use {accelerator} (status {status})"
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return f"a forked process that uses {accelerator} does not come back"


def _sing(accelerator: str, device: Mapping[str, str]) -> NoReturn:
    status = 1
    try:
        os.environ.update(device)
        import torch

        torch.empty(1, device=accelerator)
        status = 0
    except Exception as error:
        full = type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error)
        status = _CANARY_IS_FULL if full else 1
        sys.stderr.write(f"no device in a forked process: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(status)


@contextlib.contextmanager
def _dying_with_its_parent() -> Iterator[None]:
    """While it imports, for seconds, this process does not notice that its requests have ended.

    It has started nothing then that would have to be ended with it.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        yield
    finally:
        _prctl(_PR_SET_PDEATHSIG, 0)


@contextlib.contextmanager
def _without_compile_workers() -> Iterator[None]:
    """Older torch starts inductor's workers at its import (`_inductor/async_compile.py` of 2.7.1).

    Only that is prevented: a rank that compiles starts as many as ever, when it first compiles.
    """
    name = "TORCH_WARM_POOL"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _threads_end(threads_before: int) -> bool:
    """Whether there are no more threads than before; one that only had a little to do may end."""
    deadline = time.monotonic() + _THREADS_END_WITHIN_S
    while _num_threads() > threads_before:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _num_threads() -> int:
    """Threads of this process, but for those that end and begin again around a fork."""
    tasks = Path("/proc/self/task")
    count = 0
    for task in tasks.iterdir() if tasks.is_dir() else [tasks]:
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text().strip()
            count += name not in _THREADS_THAT_MAY_FORK
    return max(1, count)


def _unlink_shared_memory(group: _Group) -> None:
    """Of the trial's port, and of those that its ranks chose themselves."""
    lines = [] if group.ports is None else (_text(group.ports) or "").splitlines()
    for port in {group.port, *(int(line) for line in lines if line.isdigit())}:
        unlink_shared_memory(port)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return None


def _descendants(pids: Any, *, recursive: bool = True) -> set[int]:
    """All processes below the given ones, wherever they moved their process group."""
    import psutil

    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found |= {child.pid for child in psutil.Process(pid).children(recursive=recursive)}
    return found


def _started_by(pid: int, folder: str) -> bool:
    """Whether a process descends from a trial: by its environment, or else by where it prints."""
    import psutil

    try:
        if psutil.Process(pid).environ().get("DSAT_TRIAL_DIR") == folder:
            return True
        outputs = [os.readlink(f"/proc/{pid}/fd/{descriptor}") for descriptor in (1, 2)]
    except (psutil.Error, OSError):
        return False
    return any(os.path.dirname(output) == folder for output in outputs)


def _kill_all(group: int, pids: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _kill_everything_below() -> None:
    """Ends what a trial left behind: as the subreaper this process inherited it."""
    for _ in range(100):
        pids = _descendants([os.getpid()])
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no PYTHONSAFEPATH
        del sys.path[0]  # the current folder, which is not the user's program's
    Supervisor().run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an orderly end takes the interpreter a second and more, with torch in it
