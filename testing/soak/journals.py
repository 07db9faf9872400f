"""Damaged journals: to show or resume a run, dsat must read them, or refuse with one line."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from dsat.run.journal import FILE_NAME, read_events
from testing.scenarios import User
from testing.soak import METHODS, Tally, inputs, mutations

_SHOW = (["show", "run"], ["show", "run", "--trials", "--json"], ["runs", "."])


def attack(seed: int, count: int) -> Tally:
    """Show and resume runs whose journals have damaged values, lines or bytes."""
    rng, tally = random.Random(seed), Tally()
    with inputs.a_user() as (user, _):
        events = {method: _searched(user, method) for method in METHODS}
        for number in range(count):
            method = rng.choice(METHODS)
            _new_run(user).write_bytes(_damaged(rng, events[method]))
            ends = [inputs.run(user, words) for words in (*_SHOW, _words(user, method, "--resume"))]
            finding = next((finding for _, finding in ends if finding), "")
            ending = f"shown with {ends[0][0]}, continued with {ends[-1][0]}"
            tally.note(ending, finding and f"{seed}/{number}: {method} {finding}")
    return tally


def _new_run(user: User) -> Path:
    """Make a new run folder; return the path of its journal."""
    folder = user.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder / FILE_NAME


def _words(user: User, method: str, *options: str) -> list[str]:
    return list(map(str, user.words("--max-trials", 9, *options, method=method)))


def _searched(user: User, method: str) -> list[dict[str, Any]]:
    """Return the events of an undisturbed search."""
    journal = _new_run(user)
    assert user.types(*_words(user, method)).status == 0
    return read_events(journal)


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
