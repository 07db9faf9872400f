"""Whole searches in a made-up world; each command is harmed, and then resumed.

Command line, journal, folders, locks, finals and reports are real (`testing.scenarios`). Processes
are forks of this one, which has imported everything.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsat.run.journal import FILE_NAME, read_events
from testing.command import run_of
from testing.harms import fail_writing
from testing.scenarios import Harm, User
from testing.soak import METHODS, Tally, complaint
from testing.started import Started, Told
from testing.world import World

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP)
_BUDGET = 12  # trials, including finals
_PAIR, _WORTHWHILE, _WRONG = 2, 0.03, 0.1  # trials of a pair; log of a gain; allowed share
_ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)


class Search:
    """A search that can be started, harmed and resumed in a folder."""

    def __init__(self, method: str, folder: Path, pause_s: float = 0.0) -> None:
        self.method = method
        self._user = User(folder, pause_s=pause_s)
        self._user.has()

    @property
    def _journal(self) -> Path:
        return self._user.folder / "run" / FILE_NAME

    def start(self, harm: Harm | None = None) -> Started:
        """Start or resume the command."""
        resume = ["--resume"] if self._journal.exists() else []
        words = self._user.words("--max-trials", _BUDGET, *resume, method=self.method)
        return self._user.starts(*words, harm=harm)

    def run(self, harm: Harm | None = None) -> Told:
        return self.start(harm).wait()

    def result(self) -> list[Any]:
        """Return all decisions and measurements so far, without their times."""
        found: list[Any] = []
        for event in read_events(self._journal) if self._journal.exists() else ():
            for name in ("elapsed_s", "time_s"):
                event.pop(name, None)
            if event["event"] in ("proposed", "finished", "stopped"):
                found.append(event)
        return found

    def resume(self) -> str:
        """Resume to the end; return how the result differs from that of an undisturbed search."""
        told = self.run()
        if told.status or self.result() != _undisturbed(self.method):
            return f"{self.method} ends otherwise: {told.status} {told.err[-600:]}"
        return ""


@functools.cache
def _undisturbed(method: str) -> list[Any]:
    with _folders() as folders:
        search = Search(method, next(folders))
        told = search.run()
        assert told.status == 0, told.err
        return search.result()


@contextlib.contextmanager
def _folders() -> Iterator[Iterator[Path]]:
    """Yield an iterator of new folders; each folder is removed when the next one is requested."""
    with tempfile.TemporaryDirectory(prefix="dsat-soak-") as above:

        def names() -> Iterator[Path]:
            for number in range(10**6):
                yield (folder := Path(above, str(number)))
                shutil.rmtree(folder, ignore_errors=True)

        yield names()


def kills(seed: int, count: int) -> Tally:
    """Send signals at random moments and resume to the end: trials and result must not change."""
    rng, tally = random.Random(seed), Tally()
    with _folders() as folders:
        while tally.tried < count:
            search = Search(rng.choice(METHODS), next(folders), pause_s=0.01)
            finding, over = "", False
            while tally.tried < count and not over and not finding:
                number, command = rng.choice(SIGNALS), search.start()
                time.sleep(rng.random() * 1.5)
                command.signal(number)
                if number == signal.SIGSTOP:  # as when a laptop is suspended
                    time.sleep(0.05)
                    command.signal(signal.SIGCONT)
                told, result = command.wait(), search.result()
                if "Traceback" in told.err or told.status == 70:
                    finding = told.err[-600:]
                elif result != _undisturbed(search.method)[: len(result)]:
                    finding = f"{search.method}: the journal is not what it was"
                over = told.status == 0
                tally.note(signal.Signals(number).name, finding and f"{seed}: {finding}")
            if not finding and (finding := search.resume()):
                tally.findings.append(f"{seed}/{tally.tried}: {finding}")
    return tally


def failing_calls(seed: int, count: int) -> Tally:
    """Make one call to the file system fail, or all from then on; then resume."""
    rng, tally = random.Random(seed), Tally()
    with _folders() as folders:
        while tally.tried < count:
            search = Search(rng.choice(METHODS), next(folders))
            after, code, for_ever = rng.randrange(1, 200), rng.choice(_ERRORS), rng.random() < 0.5
            failing = functools.partial(fail_writing, after, code, for_ever=for_ever)
            told = search.run(Harm(before=failing))
            finding = complaint(told) or search.resume()
            name = errno.errorcode[code] if told.status else "not met"
            where = f"{seed}/{tally.tried}: {search.method}, call {after}, {name}"
            tally.note(name, finding and f"{where}: {finding}")
    return tally


def full_disks(seed: int, count: int) -> Tally:
    """Search on a file system of 256 KiB that may fill up, then resume on a larger one.

    Needs permission to mount.
    """
    rng, tally = random.Random(seed), Tally()
    with _folders() as folders:
        while tally.tried < count:
            disk = next(folders)
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
            try:
                search = Search(rng.choice(METHODS), disk / "work")
                (disk / "used").write_bytes(b"x" * rng.randrange(0, 200 * 1024, 4096))
                told = search.run()
                (disk / "used").unlink()
                subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
                finding = complaint(told) or search.resume()
            finally:
                subprocess.run(["umount", "-l", disk], check=True)
            name = "full" if told.status else "not met"
            tally.note(name, finding and f"{seed}/{tally.tried}: {finding}")
    return tally


def several_at_once(seed: int, count: int) -> Tally:
    """Start two or five commands in one folder: one must run, the others must refuse."""
    rng, tally = random.Random(seed), Tally()
    refusals = ("another dsat process", "already holds a run")
    with _folders() as folders:
        while tally.tried < count:
            several = rng.choice((2, 5))
            search = Search(rng.choice(METHODS), next(folders), pause_s=0.02)
            told = [command.wait() for command in [search.start() for _ in range(several)]]
            finding = ""
            for one in told:
                is_lost = one.status and not any(text in one.err for text in refusals)
                if is_lost or "Traceback" in one.err:
                    finding = f"status {one.status}: {one.err[-600:]}"
            if all(one.status for one in told) or search.result() != _undisturbed(search.method):
                finding = finding or "none ended well"
            tally.note(f"{several} at once", finding and f"{seed}/{tally.tried}: {finding}")
    return tally


def budgets(seed: int, count: int) -> Tally:
    """Search with run-to-run variation.

    An undecided comparison must use up its trials, and few recommendations may be slower.
    """
    rng, tally, wrong = random.Random(seed), Tally(), 0
    with _folders() as folders:
        while tally.tried < count:
            varies, most = rng.choice((0.02, 0.05, 0.08)), rng.randrange(4, 16)
            world = World(slots=2, seed=rng.randrange(10**6), run_sd=varies)
            user = User(next(folders), world)
            user.has()
            told = user.tunes("--max-trials", most, "--max-micro-batch", 1)
            run, finding = run_of(user.folder / "run"), complaint(told)
            left = most - len(run.trials)
            comparison = None if run.finals is None else run.finals.comparison
            ending = "decided"
            if comparison is not None and run.finals is not None and not run.finals.is_better:
                ending = "undecided" if comparison.mean > _WORTHWHILE else "no gain"
            if ending == "undecided" and left >= 2 * _PAIR:
                finding = finding or f"{left} of {most} trials are left, but it is undecided"
            own = user.true_speed(run.plan.config({}))
            if run.best is not run.baseline and user.true_speed(user.best_config()) < own:
                wrong += 1
            tally.note(ending, finding and f"{seed}/{tally.tried}: {finding}")
    if wrong > max(1, _WRONG * count):
        tally.findings.append(f"{seed}: {wrong} of {count} recommend what is slower")
    return tally
