"""Signals to the processes of real searches with real ranks.

Remaining processes are found by session, process group and open files, not by environment.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import psutil

from testing.command import FAST, Background, command_of, dsat, events_of
from testing.local import buffers_of, is_alive
from testing.soak import Tally
from testing.soak.runs import SIGNALS

_OPTIONS = [*FAST, "-mt", "8", "-m", "throughput"]  # enough for finals of one pair


def kills(seed: int, count: int) -> Tally:
    """Signal the tuner, the supervisor or a rank at a random moment, then resume."""
    rng, tally = random.Random(seed), Tally()
    while tally.tried < count:
        with tempfile.TemporaryDirectory(prefix="dsat-soak-") as above:
            run_dir = Path(above) / "run"
            finding, over = "", False
            while tally.tried < count and not finding and not over:
                ending, finding, over = _harmed(rng, run_dir)
                tally.note(ending, f"{seed}/{tally.tried}: {finding}" if finding else "")
            told = dsat("model", "tiny", run_dir, *_OPTIONS, *_resume(run_dir))
            ids = [e["trial_id"] for e in events_of(run_dir) if e["event"] == "finished"]
            is_whole = len(ids) >= 3 and sorted(ids) == list(range(len(ids)))
            if told.status or "Traceback" in told.err or not is_whole:
                tally.findings.append(f"{seed}/{tally.tried}: ends with {told} {ids}")
    return tally


def _resume(run_dir: Path) -> list[str]:
    return ["--resume"] if (run_dir / "journal.jsonl").exists() else []


def _harmed(rng: random.Random, run_dir: Path) -> tuple[str, str, bool]:
    before = events_of(run_dir)
    background = Background(command_of("model", "tiny", run_dir, *_OPTIONS, *_resume(run_dir)))
    time.sleep(rng.uniform(1.0, 16.0))
    below = background.process.children(recursive=True)
    sessions = {child.pid for child in below}
    role, targets = rng.choice(
        (("tuner", [background.process]), ("supervisor", below[:1]), ("rank", below[1:2]))
    )
    number = rng.choice(SIGNALS)
    for target in targets:
        with contextlib.suppress(psutil.Error):
            target.send_signal(number)
            if number == signal.SIGSTOP:
                time.sleep(0.2)
                target.send_signal(signal.SIGCONT)
    ending = f"{signal.Signals(number).name} to the {role}"
    deadline = time.monotonic() + 2
    while is_alive(background.process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    if is_alive(background.process.pid):  # the signal did not end it: press Ctrl-C
        background.process.send_signal(signal.SIGINT)
    told = background.end()
    finding = ""
    if "Traceback" in told.err or told.status == 70:
        finding = f"{ending}: {told.err[-600:]}"
    if events_of(run_dir)[: len(before)] != before:
        finding = f"{ending}: the journal is not what it was"
    deadline = time.monotonic() + 10
    while (left := _left_of(run_dir, sessions)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        finding = f"{ending}: left {left}"
    return ending, finding, told.status == 0


def _left_of(run_dir: Path, sessions: set[int]) -> list[str]:
    """Return the processes and the shared memory that remain of a run."""
    folder, found = str(run_dir.resolve()), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            groups = {os.getsid(process.pid), os.getpgid(process.pid)}
            files = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{process.pid}/fd")]
            if groups & sessions or any(path.startswith(folder) for path in files):
                found.append(f"{process.pid} {process.name()}")
    return found + buffers_of(run_dir)
