"""Damaged journals: read or refused with one line, whether they are shown or continued."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from dsat.errors import DsatError
from dsat.report import page, summary, terminal
from dsat.report.run_view import RunView
from dsat.report.verdict import verdict
from dsat.tuning.journal import MemoryJournal, parse, read_events
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from testing.helpers import FakeClock, World, drive, plan_of
from testing.soak import Hang, Tally, at_most, mutations

LIMIT_S = 30.0
_METHODS = ("model", "asha", "binary", "random", "gridsearch")


def attack(seed: int, count: int) -> Tally:
    """Journals of made-up runs with values, lines or bytes damaged."""
    rng, tally = random.Random(seed), Tally()
    lines = {method: _journal(method) for method in _METHODS}
    with tempfile.TemporaryDirectory(prefix="dsat-soak-") as folder:
        path = Path(folder) / "journal.jsonl"
        for number in range(count):
            method = rng.choice(_METHODS)
            path.write_bytes(_damaged(rng, lines[method]))
            ending, finding = _use(path, method)
            tally.note(ending, f"{seed}/{number}: {method} {finding}" if finding else "")
    return tally


def _use(path: Path, method: str) -> tuple[str, str]:
    """Shows a run and goes on with it."""
    endings = []
    for use in (_show, _resume):
        try:
            with at_most(LIMIT_S):
                use(path, method)
            endings.append("used")
        except DsatError:
            endings.append("refused")
        except Hang:
            return "hang", f"{use.__name__} took longer than {LIMIT_S:g} s"
        except Exception as error:
            return "traceback", f"{use.__name__} raised {error!r}"
    return ", ".join(endings), ""


def _show(path: Path, method: str) -> None:
    run = Run(read_events(path))
    if run.has_begun:
        summary.markdown(RunView.of(run), "train").encode("utf-8", "surrogateescape")
        json.dumps(RunView.of(run).to_json(path.parent), allow_nan=False)
        terminal.of_runs([(method, "over", path.stat().st_mtime, run)])
        page.html(run, "trials", "train").encode("utf-8", "surrogateescape")
        verdict(run)


def _resume(path: Path, method: str) -> None:
    events, _ = parse(path.read_bytes(), str(path))
    tuner = Tuner(plan_of(method), MemoryJournal(events), events=events, clock=FakeClock())
    drive(tuner, World())


def _journal(method: str) -> list[dict[str, Any]]:
    journal = MemoryJournal()
    drive(Tuner(plan_of(method), journal, clock=FakeClock(), time_of_day=lambda: 1.8e9), World())
    return journal.events


def _damaged(rng: random.Random, events: list[dict[str, Any]]) -> bytes:
    events = list(events)
    kind = rng.randrange(8)
    at = rng.randrange(len(events))
    if kind <= 3:
        events[at] = mutations.of_values(rng, events[at])
    elif kind == 4:
        del events[at]
    elif kind == 5:
        events.insert(rng.randrange(len(events)), events[at])
    elif kind == 6:
        other = rng.randrange(len(events))
        events[at], events[other] = events[other], events[at]
    text = "".join(f"{json.dumps(event)}\n" for event in events)
    return mutations.of_text(rng, text) if kind == 7 else text.encode()
