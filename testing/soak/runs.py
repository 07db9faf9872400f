"""Whole searches with made-up trials; each command runs in a process that is harmed.

Command line, journal, folders, locks and reports are real. Outcomes of trials are made up, so that
a search takes a second. Processes are forked from this one, which has imported everything.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from dsat.app import local
from dsat.cli import main
from dsat.engines.places import local as this_machine
from dsat.tuning.journal import FILE_NAME, read_events
from testing.helpers import World
from testing.local import PROGRAMS, cpu_machine
from testing.simulated import SimulatedEngine
from testing.soak import Tally

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP)
_METHODS = ("asha", "binary", "random", "gridsearch")
_LIMIT_S = 120.0
_MOST_SAID_BYTES = 2**20
_ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
_CALLS = ("open", "write", "fsync", "replace", "mkdir", "ftruncate", "unlink", "rename")
InChild = Callable[[], None]


@dataclass(frozen=True)
class Told:
    """End of a command."""

    status: int
    said: str


@dataclass(frozen=True)
class Search:
    """A search that can be started, harmed and resumed in a folder."""

    method: str
    folder: Path
    pause_s: float = 0.0

    @property
    def exists(self) -> bool:
        return (self.folder / FILE_NAME).exists()

    def start(self, harm: InChild = lambda: None) -> tuple[int, int]:
        """Start or resume the command; return its process and the pipe with its output."""
        # No file: a limit on the size of files would hold for it as well.
        said, to_say = os.pipe()
        fcntl.fcntl(to_say, fcntl.F_SETPIPE_SZ, _MOST_SAID_BYTES)
        pid = os.fork()
        if pid == 0:
            os.close(said)
            self._run(to_say, harm)
        os.close(to_say)
        return pid, said

    def run(self, harm: InChild = lambda: None) -> Told:
        return wait(*self.start(harm))

    def result(self) -> list[Any]:
        """Return all decisions and measurements, without their times."""
        found: list[Any] = []
        for event in read_events(self.folder / FILE_NAME):
            for name in ("elapsed_s", "time_s"):
                event.pop(name, None)
            if event["event"] in ("proposed", "finished", "stopped"):
                found.append(event)
        return found

    def _argv(self) -> list[str]:
        options = "--engine local --memory-model formula -m throughput -mt 12 --finals 0".split()
        where = [str(PROGRAMS / "tiny" / "deepspeed.yaml"), str(PROGRAMS / "tiny")]
        resume = ["--resume"] if self.exists else []
        return [self.method, *where, *options, "--run-dir", str(self.folder), *resume]

    def _run(self, to_say: int, harm: InChild) -> NoReturn:
        status = 70
        try:
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            for standard in (1, 2):
                os.dup2(to_say, standard)
            os.close(to_say)
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            with (
                mock.patch.object(this_machine, "find_machine", return_value=cpu_machine(2)),
                mock.patch.dict(local.ENGINES, {"local": self._engine}),
            ):
                argv = self._argv()
                harm()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                status = main.main(argv)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _engine(self, ready: Any, folder: Path) -> SimulatedEngine:
        world = World()

        def outcome_of(trial: Any) -> Any:
            time.sleep(self.pause_s)
            return world.outcome(trial)

        return SimulatedEngine(outcome_of, num_slots=2, slots_per_trial=2)


def wait(pid: int, said: int) -> Told:
    """Wait for a command; status -SIGALRM if it hangs."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(said)
            return Told(-signal.SIGALRM, "it hangs")
        time.sleep(0.005)
    os.set_blocking(said, False)  # a descendant may still hold the other end
    text = b""
    with contextlib.suppress(BlockingIOError):
        text = os.read(said, _MOST_SAID_BYTES)
    os.close(said)
    return Told(os.waitstatus_to_exitcode(status), text.decode("utf-8", "replace"))


class Folders:
    """New run folders, and results of undisturbed searches."""

    def __init__(self, above: Path) -> None:
        self._above = above
        self._count = 0
        self._calm: dict[str, list[Any]] = {}

    def new(self) -> Path:
        self._count += 1
        return self._above / f"run-{self._count}"

    def calm(self, method: str) -> list[Any]:
        """Return the result of an undisturbed search."""
        if method not in self._calm:
            search = Search(method, self.new())
            told = search.run()
            assert told.status == 0, told.said
            self._calm[method] = search.result()
        return self._calm[method]

    def resumed(self, search: Search) -> str:
        """Resume a search; return how its end differs from an undisturbed one."""
        told = search.run()
        if told.status or search.result() != self.calm(search.method):
            return f"{search.method} ends otherwise: {told.status} {told.said[-600:]}"
        return ""


@contextlib.contextmanager
def _folders() -> Iterator[Folders]:
    with tempfile.TemporaryDirectory(prefix="dsat-soak-") as above:
        yield Folders(Path(above))


def kills(seed: int, count: int) -> Tally:
    """Send signals at random moments and resume to the end: the same trials, the same result."""
    rng, tally = random.Random(seed), Tally()
    with _folders() as folders:
        while tally.tried < count:
            search = Search(rng.choice(_METHODS), folders.new(), pause_s=0.01)
            finding, over = "", False
            while tally.tried < count and not over and not finding:
                number = rng.choice(SIGNALS)
                pid, said = search.start()
                time.sleep(rng.random() * 0.6)
                _send(pid, number)
                told = wait(pid, said)
                calm = folders.calm(search.method)
                if "Traceback" in told.said or told.status == 70:
                    finding = told.said[-600:]
                elif search.exists and search.result() != calm[: len(search.result())]:
                    finding = "the journal is not what it was"
                over = told.status == 0
                name = signal.Signals(number).name
                tally.note(name, f"{seed}/{tally.tried}: {name}: {finding}" if finding else "")
            if not finding and (finding := folders.resumed(search)):
                tally.findings.append(f"{seed}/{tally.tried}: {finding}")
    return tally


def failing_calls(seed: int, count: int) -> Tally:
    """Fail one call to the file system, or all from then on; then resume."""
    rng, tally = random.Random(seed), Tally()
    with _folders() as folders:
        while tally.tried < count:
            search = Search(rng.choice(_METHODS), folders.new())
            after, code, for_ever = rng.randrange(1, 200), rng.choice(_ERRORS), rng.random() < 0.5
            told = search.run(functools.partial(_fail, after, code, for_ever=for_ever))
            finding = _complaint(told) or folders.resumed(search)
            name = errno.errorcode[code] if told.status else "not met"
            tally.note(name, f"{seed}/{tally.tried}: {name}: {finding}" if finding else "")
    return tally


def full_disks(seed: int, count: int) -> Tally:
    """Search on a full file system of 256 KiB, then resume on a larger one; needs to mount."""
    rng, tally = random.Random(seed), Tally()
    with _folders() as folders:
        while tally.tried < count:
            disk = folders.new()
            disk.mkdir()
            search = Search(rng.choice(_METHODS), disk / "run")
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
            try:
                (disk / "used").write_bytes(b"x" * rng.randrange(0, 256 * 1024, 4096))
                told = search.run()
                (disk / "used").unlink()
                subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
                finding = _complaint(told) or folders.resumed(search)
            finally:
                subprocess.run(["umount", "-l", disk], check=True)
            name = "full" if told.status else "not met"
            tally.note(name, f"{seed}/{tally.tried}: {finding}" if finding else "")
    return tally


def several_at_once(seed: int, count: int) -> Tally:
    """Start two and five commands in one folder: one runs, the others name it."""
    rng, tally = random.Random(seed), Tally()
    refusals = ("another dsat process", "already holds a run")
    with _folders() as folders:
        while tally.tried < count:
            method, several = rng.choice(_METHODS), rng.choice((2, 5))
            search = Search(method, folders.new(), pause_s=0.02)
            told = [wait(*started) for started in [search.start() for _ in range(several)]]
            finding = ""
            for one in told:
                lost = one.status and not any(said in one.said for said in refusals)
                if lost or "Traceback" in one.said:
                    finding = f"status {one.status}: {one.said[-600:]}"
            if all(one.status for one in told) or search.result() != folders.calm(method):
                finding = finding or "none ended well"
            tally.note(f"{several} at once", f"{seed}/{tally.tried}: {finding}" if finding else "")
    return tally


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        if number == signal.SIGSTOP:  # as when a laptop's lid is closed
            time.sleep(0.05)
            os.kill(pid, signal.SIGCONT)


def _complaint(told: Told) -> str:
    """Return the fault in a command's reaction to a failure of the system."""
    if "Traceback" in told.said or told.status not in (0, 1, 2):
        return f"status {told.status}: {told.said[-600:]}"
    if told.status and "error: " not in told.said:
        return f"says nothing: {told.said[-600:]}"
    return ""


def _fail(after: int, code: int, *, for_ever: bool) -> None:
    """Make the `after`-th writing call of `os` fail; in this process, which is a child."""
    left = after

    def failing(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            if not _reads_only(real, args):
                left -= 1
                if left == 0 or (left < 0 and for_ever):
                    raise OSError(code, os.strerror(code), *_paths(args))
            return real(*args, **options)

        return call

    for name in _CALLS:
        setattr(os, name, failing(getattr(os, name)))


def _reads_only(real: Any, args: tuple[Any, ...]) -> bool:
    if real.__name__ == "open":
        flags = args[1] if len(args) > 1 else os.O_RDONLY
        return not flags & (os.O_WRONLY | os.O_RDWR)
    return real.__name__ == "write" and args[0] in (1, 2)


def _paths(args: tuple[Any, ...]) -> tuple[str, ...]:
    return (os.fspath(args[0]),) if args and isinstance(args[0], (str, os.PathLike)) else ()
