"""Journals of other versions: they are shown, and those of the last release are resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from testing.scenarios import User
from testing.world import World
from tests.scenarios.checks import check_complete

JOURNALS = Path(__file__).parent / "journals"


def last_release(folder: Path) -> User:
    """Return a user with a run that the last release made in this same world."""
    user = User(folder, World(at_once=2))
    shutil.copytree(JOURNALS / "last_release", folder, dirs_exist_ok=True)
    return user


@pytest.mark.parametrize("events", [5, 12, 21, 1000])
def test_a_run_of_the_last_release_is_resumed(tmp_path: Path, events: int) -> None:
    user = last_release(tmp_path)
    recorded = user.events()
    user.cut(events)
    told = user.tunes("--max-trials", 12, "--resume", method="asha")
    check_complete(user, told, 12)
    assert user.events()[: min(events, len(recorded))] == recorded[:events]
    more = user.tunes("--max-trials", 16, "--resume", method="asha")
    check_complete(user, more, 16)
    assert len(more.trials) > len(told.trials)


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    user = last_release(tmp_path)
    plain = user.types("show", "run", "--json")
    path = tmp_path / "run" / "journal.jsonl"
    later = [{**event, "later": 1} for event in user.events()]
    for event in later:
        for key in event.keys() & {"plan", "trial", "outcome"}:
            event[key] = {**event[key], "later": {"a": 1}}
    later.insert(9, {"event": "from the future", "elapsed_s": 0.0})
    path.write_text("".join(f"{json.dumps(event)}\n" for event in later), encoding="utf-8")
    shown = user.types("show", "run", "--json")
    assert shown.status == 0 and shown.json["trials"] == plain.json["trials"]


@pytest.mark.parametrize("name", ["before_smaller_may_run", "of_last_version"])
def test_an_older_journal_is_shown(tmp_path: Path, name: str) -> None:
    """The first lacks `Outcome.smaller_may_run`, `Trial.strategy` and half of `Plan`."""
    (tmp_path / "run").mkdir()
    shutil.copy(JOURNALS / f"{name}.jsonl", tmp_path / "run" / "journal.jsonl")
    shown = User(tmp_path).types("show", "run", "--json", "--trials")
    assert shown.status == 0, shown.err
    assert len(shown.json) == 12 and sum(row["outcome"] == "OK" for row in shown.json) > 3
