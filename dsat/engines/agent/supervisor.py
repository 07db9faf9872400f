"""Supervisor: the process that starts and ends the ranks of all trials.

    python3 -m dsat.engines.agent.supervisor

It reads requests as JSON lines from standard input and writes answers to standard output. A "warm"
request makes it import torch and DeepSpeed, so that ranks forked from it need not import them. From
then on it must neither start a thread nor touch a device, because it could no longer fork. With
"fork" false, a "launch" request starts fresh processes.

No process of a trial outlives the trial or the supervisor. The supervisor ends when its standard
input does, because dsat may be killed at any time.

Requests:
    {"op": "warm", "modules": [...],
     "device": environment variables that limit a process to one device}
    {"op": "launch", "trial": id, "folder": path, "cwd": path, "port": n,
     "fork": whether ranks run their Python program in a fork of the supervisor,
     "starts_ranks": whether the processes are ranks; else a command starts the ranks,
     "ranks": [{"env": {...}, "cores": [...], "command": [...]}],
     "swap": [folders on NVMe that only this trial uses; removed at its end],
     "logs": [name, name] of their standard output and standard error,
     "is_full_run": if false, the trial is killed some seconds after one of its ranks has ended with
                    status 0, or `DONE_FILE` has appeared in its folder}
    {"op": "kill", "trial": id, "grace_s": seconds in which it may end by itself}
    {"op": "look", "files": [path, ...], "folder": path}
    {"op": "ping"}
Answers, each after `MARK`:
    {"event": "warm", "reason": why ranks cannot be forked; empty if they can be}
    {"event": "look", "digests": [one for each file; empty if it cannot be read],
     "is_folder": whether the folder exists, "pid": of the supervisor}
    {"event": "pong"}
    {"event": "ended", "trial": id, "statuses": [exit status or -signal by rank],
     "killed": [whether the supervisor killed the rank, by rank]}
The supervisor also ends if a rank cannot be killed, so that no other trial gets its device.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dsat.engines.agent import leftovers
from dsat.engines.agent.rank_process import (
    FOR_DSAT,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    become_rank,
    prctl,
)
from dsat.engines.agent.warm_up import warm_up
from dsat.in_trial.hook import TRIAL_VARIABLE
from dsat.in_trial.rank_files import DONE_FILE, PORTS_FILE
from dsat.values.files import digest

# Precedes each answer, because a login shell on another host may print anything.
MARK = b"dsat-answer "
# After a rank fails, the others soon fail, too, and their reports may explain more.
GRACE_AFTER_FAILURE_S = 0.3
# Seconds that ranks may run after another rank has ended with status 0.
LINGER_S = 20.0
# A measured rank may run the clean-up of its script.
_GRACE_AFTER_RESULT_S = 5.0
# A killed process ends when its last system call returns; a call of a driver may never do so.
_STUCK_AFTER_S = 60.0
_GONE_WITHIN_S = 2.0
_TRACKED_WITHIN_S = 10.0  # enough for a resource tracker to unlink everything on a busy host
# Between looks at the files and deadlines of running trials, and at processes without a pidfd.
_POLL_S = 0.05


@dataclass
class _Group:
    """Ranks of one trial.

    Attributes:
        request: the launch request.
        done: when this file appears, the ranks have `done_grace_s` to end; None afterwards.
        pidfds: by PID, descriptors that become readable when a rank ends; empty before Linux 5.3.
    """

    request: Mapping[str, Any]
    pids: list[int] = field(default_factory=list)
    pidfds: dict[int, int] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)
    killed_ranks: set[int] = field(default_factory=set)
    kill_at: float = math.inf
    killed_at: float = math.inf
    descendants: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.folder: str = self.request["folder"]
        self.done = None if self.request["is_full_run"] else Path(self.folder, DONE_FILE)
        starts_ranks = self.request["starts_ranks"]
        self.done_grace_s = _GRACE_AFTER_RESULT_S if starts_ranks else GRACE_AFTER_FAILURE_S

    def remove_leftovers(self) -> None:
        leftovers.unlink_shared_memory(Path(self.folder, PORTS_FILE), self.request["port"])
        for folder in self.request["swap"]:
            shutil.rmtree(folder, ignore_errors=True)


class Supervisor:
    """Single-threaded event loop, since a process with threads cannot fork safely."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._helpers = set[int]()  # processes that imports have started, such as a tracker
        self._buffer = b""
        # The protocol uses copies of the descriptors, so that prints of libraries cannot break it.
        self._requests = os.dup(0)
        self._answers = os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)
        for number in FOR_DSAT:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the parent may ignore it
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def run(self) -> None:
        """Serve until standard input ends or a rank cannot be killed; then kill all trials."""
        try:
            while True:
                timeout_s = _POLL_S if self._groups else None
                ready, _, _ = select.select([self._requests, *self._pidfds()], [], [], timeout_s)
                if self._requests in ready and not self._read_requests():
                    return
                self._reap()
                self._kill_overdue()
                killed_at = min((g.killed_at for g in self._groups.values()), default=math.inf)
                if killed_at + _STUCK_AFTER_S <= time.monotonic():
                    sys.stderr.write(
                        "dsat: a rank hangs in a device driver, and cannot be killed\n"
                    )
                    return
        finally:
            until = time.monotonic() + _TRACKED_WITHIN_S  # one deadline for all trials
            for group in list(self._groups.values()):
                self._kill(group, until)
            # Resource trackers end by themselves, at the latest after this process.
            _kill_until_gone(
                lambda: {pid for pid in _descendants([os.getpid()]) if not _is_tracker(pid)}
            )
            for group in self._groups.values():
                group.remove_leftovers()

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
            # During imports this process does not notice the end of standard input.
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            reason = warm_up(request["modules"], request["device"])
            prctl(PR_SET_PDEATHSIG, 0)
            self._helpers = _descendants([os.getpid()])
            self._answer({"event": "warm", "reason": reason})
        elif op == "launch":
            self._launch(request)
        elif op == "kill":
            group = self._groups.get(request["trial"])
            if group is not None:
                self._end(group, request["grace_s"])
        elif op == "look":
            answer = {
                "digests": [digest(Path(file)) for file in request["files"]],
                "is_folder": Path(request["folder"]).is_dir(),
            }
            self._answer({"event": "look", **answer, "pid": os.getpid()})
        elif op == "ping":
            self._answer({"event": "pong"})

    def _answer(self, message: Mapping[str, Any]) -> None:
        # If dsat no longer reads, standard input ends as well, and then this process.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._answers, MARK + json.dumps(message).encode() + b"\n")

    # -- processes

    def _launch(self, request: Mapping[str, Any]) -> None:
        self._groups[request["trial"]] = group = _Group(request)
        sys.stdout.flush()
        sys.stderr.flush()
        own_pid = os.getpid()
        for rank in request["ranks"]:
            leader = group.pids[0] if group.pids else 0
            pid = os.fork()
            if pid == 0:
                descriptors = [self._requests, self._answers, *self._pidfds()]
                become_rank(request, rank, leader, own_pid, descriptors)
            with contextlib.suppress(OSError):  # the child did it first, or is gone
                os.setpgid(pid, leader or pid)
            group.pids.append(pid)
            with contextlib.suppress(OSError):
                group.pidfds[pid] = os.pidfd_open(pid)

    def _pidfds(self) -> list[int]:
        return [pidfd for group in self._groups.values() for pidfd in group.pidfds.values()]

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
                    if pid in group.pidfds:
                        os.close(group.pidfds.pop(pid))
                    self._note_end(group, group.pids.index(pid), os.waitstatus_to_exitcode(status))
                    break

    def _note_end(self, group: _Group, rank: int, status: int) -> None:
        group.statuses[rank] = status
        if len(group.statuses) == len(group.pids):
            self._finish(group)
            return
        if status != 0:
            self._end(group, GRACE_AFTER_FAILURE_S)
        elif not group.request["is_full_run"]:
            self._end(group, LINGER_S)

    def _finish(self, group: _Group) -> None:
        """Kill the remaining processes of a trial, delete its temporary files, report its end."""
        del self._groups[group.request["trial"]]
        _kill_until_gone(lambda: group.descendants | self._strays(group))
        group.remove_leftovers()
        ranks = range(len(group.pids))
        self._answer(
            {
                "event": "ended",
                "trial": group.request["trial"],
                "statuses": [group.statuses[rank] for rank in ranks],
                "killed": [rank in group.killed_ranks for rank in ranks],
            }
        )

    def _end(self, group: _Group, grace_s: float) -> None:
        """Kill a trial after a grace period, in which it may end by itself."""
        if grace_s <= 0:
            self._kill(group)
        else:
            group.kill_at = min(group.kill_at, time.monotonic() + grace_s)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for group in list(self._groups.values()):
            if group.done is not None and group.done.exists():
                group.done = None
                self._end(group, group.done_grace_s)
            if group.kill_at <= now < group.killed_at:
                self._kill(group)

    def _kill(self, group: _Group, until: float = math.inf) -> None:
        group.killed_at = time.monotonic()
        group.killed_ranks = set(range(len(group.pids))) - group.statuses.keys()
        pids = {group.pids[rank] for rank in group.killed_ranks}
        group.descendants |= _descendants(pids)
        leftovers.kill_all(pids)
        _kill_until_gone(lambda: group.descendants | self._strays(group), until)

    def _strays(self, ended: _Group) -> set[int]:
        """Return the orphans of a trial, now children of this subreaper, and their descendants."""
        ranks = {pid for group in (ended, *self._groups.values()) for pid in group.pids}
        strays = _descendants([os.getpid()], recursive=False) - ranks - self._helpers
        if self._groups:  # other trials may have left orphans, too
            strays = {pid for pid in strays if _is_of_trial(pid, ended.folder)}
        return strays | _descendants(strays)


def _descendants(pids: Iterable[int], *, recursive: bool = True) -> set[int]:
    """Return descendants of processes, in any process group; only children unless `recursive`."""
    descendants: set[int] = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            descendants |= {
                child.pid for child in psutil.Process(pid).children(recursive=recursive)
            }
    return descendants


def _is_of_trial(pid: int, folder: str) -> bool:
    """Return whether a process belongs to a trial, by its environment or its output files."""
    try:
        if psutil.Process(pid).environ().get(TRIAL_VARIABLE) == folder:
            return True
        outputs = [os.readlink(f"/proc/{pid}/fd/{descriptor}") for descriptor in (1, 2)]
    except (psutil.Error, OSError):
        return False
    return any(os.path.dirname(output) == folder for output in outputs)


def _is_tracker(pid: int) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in w for w in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _kill_until_gone(find: Callable[[], set[int]], until: float = math.inf) -> None:
    """Kill the processes that `find` returns; wait until they are gone, or 2 s if they are stuck.

    Python's resource trackers unlink the shared memory of ranks, which exit without clean-up, and
    then end by themselves. They are killed only at `until` or after 10 s. `find` is called
    repeatedly, because some processes become orphans only when others end.
    """
    tracked_until = min(until, time.monotonic() + _TRACKED_WITHIN_S)
    deadline, pids = time.monotonic() + _GONE_WITHIN_S, set[int]()
    while pids := {pid for pid in pids | find() if not _is_gone(pid)}:
        now = time.monotonic()
        targets = {pid for pid in pids if now >= tracked_until or not _is_tracker(pid)}
        if not targets:
            deadline = now + _GONE_WITHIN_S
        elif now >= deadline:
            return
        leftovers.kill_all(targets)
        time.sleep(0.005)


def _is_gone(pid: int) -> bool:
    """Return whether a process has ended; reap it if it is a child."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return not psutil.pid_exists(pid)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no PYTHONSAFEPATH
        del sys.path[0]  # the current folder, whose modules must not shadow others
    Supervisor().run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # with torch imported, a regular exit takes a second or more
