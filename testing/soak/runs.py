"""Whole searches with made-up trials, each command in a process of its own that may be harmed.

The command line, journal, folders, locks and reports are the real ones; what trials come to is made
up, so that a search takes a second. Processes are forked from this one, which has imported all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import sys
import tempfile
import time
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

METHODS = ("asha", "binary", "random", "gridsearch")
_LIMIT_S = 120.0
_MOST_SAID_BYTES = 2**20
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP)
InChild = Callable[[], None]


@dataclass(frozen=True)
class Told:
    """End of a command."""

    status: int
    said: str


@dataclass(frozen=True)
class Search:
    """A search that can be begun, harmed and continued in a folder."""

    method: str
    folder: Path
    pause_s: float = 0.0

    def command(self, *, resume: bool) -> list[str]:
        options = "--engine local --memory-model formula -m throughput -mt 12 --finals 0".split()
        where = [str(PROGRAMS / "tiny" / "deepspeed.yaml"), str(PROGRAMS / "tiny")]
        again = ["--resume"] if resume else []
        return [self.method, *where, *options, "--run-dir", str(self.folder), *again]

    @property
    def exists(self) -> bool:
        return (self.folder / FILE_NAME).exists()

    def start(self, harm: InChild = lambda: None) -> tuple[int, int]:
        """Starts the command, or goes on with it; its process and where to read what it says."""
        # No file, which a limit on the size of files would hold for as well.
        said, to_say = os.pipe()
        fcntl.fcntl(to_say, fcntl.F_SETPIPE_SZ, _MOST_SAID_BYTES)
        pid = os.fork()
        if pid == 0:
            os.close(said)
            self._run(to_say, harm)
        os.close(to_say)
        return pid, said

    def run(self, harm: InChild = lambda: None) -> Told:
        """Runs it to its end."""
        return wait(*self.start(harm))

    def result(self) -> list[Any]:
        """Return all decisions and measurements, without durations."""
        found: list[Any] = []
        for event in read_events(self.folder / FILE_NAME):
            event.pop("elapsed_s", None)
            if event["event"] in ("proposed", "finished", "stopped"):
                found.append(event)
        return found

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
                argv = self.command(resume=self.exists)
                harm()
                signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python has it
                status = main.main(argv)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            import traceback

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
    """Waits for a command; -SIGALRM if it hangs."""
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
    os.set_blocking(said, False)  # what it has left behind may still hold the other end
    text = b""
    with contextlib.suppress(BlockingIOError):
        text = os.read(said, _MOST_SAID_BYTES)
    os.close(said)
    return Told(os.waitstatus_to_exitcode(status), text.decode("utf-8", "replace"))


@contextlib.contextmanager
def folders() -> Iterator[Iterator[Path]]:
    """New folders, one after the other."""
    with tempfile.TemporaryDirectory(prefix="dsat-soak-") as above:
        yield (Path(above) / f"run-{number}" for number in range(10**9))


def undisturbed(method: str, folder: Path) -> list[Any]:
    """Return the result of an undisturbed search."""
    search = Search(method, folder)
    told = search.run()
    assert told.status == 0, told.said
    return search.result()


class Calm(dict[str, list[Any]]):
    """Undisturbed searches by method, each made when it is first asked for."""

    def __init__(self, folders: Iterator[Path]) -> None:
        super().__init__()
        self._folders = folders

    def __missing__(self, method: str) -> list[Any]:
        self[method] = undisturbed(method, next(self._folders))
        return self[method]


def kills(seed: int, count: int) -> Tally:
    """Signals at seeded moments, and --resume until the end: the same trials, the same result."""
    rng, tally = random.Random(seed), Tally()
    with folders() as new:
        calm = Calm(new)
        while tally.tried < count:
            method = rng.choice(METHODS)
            search = Search(method, next(new), pause_s=0.01)
            finding = ""
            while tally.tried < count:
                number = rng.choice(_SIGNALS)
                pid, said = search.start()
                time.sleep(rng.random() * 0.6)
                _send(pid, number)
                told = wait(pid, said)
                finding = _wrong(search, told, calm[method], number)
                over = told.status == 0
                tally.note(
                    signal.Signals(number).name,
                    f"{seed}/{tally.tried}: {finding}" if finding else "",
                )
                if over or finding:
                    break
            if not finding:
                told = search.run()
                if told.status or search.result() != calm[method]:
                    tally.findings.append(f"{seed}/{tally.tried}: {method} ends otherwise: {told}")
            shutil.rmtree(search.folder, ignore_errors=True)
    return tally


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        if number == signal.SIGSTOP:  # a laptop's lid
            time.sleep(0.05)
            os.kill(pid, signal.SIGCONT)


def _wrong(search: Search, told: Told, calm: list[Any], number: int) -> str:
    if "Traceback" in told.said or told.status == 70:
        return f"{signal.Signals(number).name}: {told.said[-600:]}"
    if search.exists and search.result() != calm[: len(search.result())]:
        return f"{signal.Signals(number).name}: the journal is not what it was"
    return ""


def complaint(told: Told) -> str:
    """Return the fault in a command's reaction to a failure of the system."""
    if "Traceback" in told.said or told.status not in (0, 1, 2):
        return f"status {told.status}: {told.said[-600:]}"
    if told.status and "error: " not in told.said:
        return f"says nothing: {told.said[-600:]}"
    return ""


def resumed(search: Search, calm: Calm, harm: InChild = lambda: None) -> str:
    """Continue a search; return how its end differs from an undisturbed one."""
    told = search.run(harm)
    if told.status or search.result() != calm[search.method]:
        return f"{search.method} ends otherwise: {told.status} {told.said[-600:]}"
    return ""


def several_at_once(seed: int, count: int) -> Tally:
    """Two and five commands in one folder: one works, the others say who does."""
    rng, tally = random.Random(seed), Tally()
    with folders() as new:
        calm = Calm(new)
        while tally.tried < count:
            method, several = rng.choice(METHODS), rng.choice((2, 5))
            search = Search(method, next(new), pause_s=0.02)
            told = [wait(*started) for started in [search.start() for _ in range(several)]]
            finding = ""
            won = [one for one in told if one.status == 0]
            for one in told:
                lost = one.status and not any(
                    said in one.said for said in ("another dsat process", "already holds a run")
                )
                if lost or "Traceback" in one.said:
                    finding = f"status {one.status}: {one.said[-600:]}"
            if not won or search.result() != calm[method]:
                finding = finding or f"{len(won)} of {several} ended well"
            tally.note(f"{several} at once", f"{seed}/{tally.tried}: {finding}" if finding else "")
    return tally
