"""The journal: how it is read, what happens to damage, and when events are on the disk."""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsat.errors import JournalError
from dsat.run.journal import SCHEMA_VERSION, Journal, read_events
from testing.scenarios import User
from testing.world import World

EVENTS: list[dict[str, Any]] = [
    {"event": "any", "schema": SCHEMA_VERSION, "info": {"name": "Größe\n"}},
    {"event": "other", "n": 1, "values": [1.5, None, True]},
    {"event": "third", "message": 'a "quoted" {brace}'},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync in tests that open a journal many times; none needs safety from power failures."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def _write(path: Path) -> bytes:
    with Journal(path) as journal:
        assert journal.events == []
        for event in EVENTS:
            journal.append(event)
    return path.read_bytes()


@pytest.mark.usefixtures("_fast_disk")
def test_cut_off_at_any_byte_it_keeps_the_complete_lines(path: Path) -> None:
    content = _write(path)
    assert content.count(b"\n") == len(EVENTS), "one line each"
    more = {"event": "more"}
    for length in (0, len(content), *random.Random(1).sample(range(len(content)), 20)):
        path.write_bytes(content[:length])
        complete = content[:length].count(b"\n")
        assert read_events(path) == EVENTS[:complete]
        assert path.stat().st_size == length, "a reader changes nothing"
        with Journal(path) as journal:
            assert journal.events == EVENTS[:complete]
            journal.append(more)
        assert read_events(path) == [*EVENTS[:complete], more]


@pytest.mark.parametrize("damage", [b"", b'{"event": ', b"\x00", b"\xff\xfe", b"[1]", b'{"a":1}'])
def test_a_damaged_line_is_named_and_nothing_is_cut_off(path: Path, damage: bytes) -> None:
    whole = _write(path)
    lines = whole.split(b"\n")
    lines[1] = damage
    content = b"\n".join(lines)
    path.write_bytes(content)
    for read in (Journal, read_events):
        with pytest.raises(JournalError, match=r"journal\.jsonl: line 2 is damaged"):
            read(path)
    assert path.read_bytes() == content
    path.write_bytes(whole)
    Journal(path).close()


@pytest.mark.parametrize("before", [b"", b'{"event":"start","schema":1}\n'])
def test_a_journal_of_a_newer_dsat_is_left_alone(path: Path, before: bytes) -> None:
    """The newer version may have continued a run that this version began."""
    newer = {"event": "start", "schema": SCHEMA_VERSION + 1}
    content = before + json.dumps(newer).encode() + b"\n{"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=rf"newer dsat \(schema {SCHEMA_VERSION + 1}"):
        Journal(path)
    assert path.read_bytes() == content


def test_what_json_cannot_hold_is_refused_and_leaves_no_trace(path: Path) -> None:
    content = _write(path)
    with Journal(path) as journal, pytest.raises(ValueError, match="JSON"):
        journal.append({"event": "third", "value": float("nan")})
    assert path.read_bytes() == content


def test_what_is_written_or_cut_off_is_on_the_disk_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(b'{"event":"n"}\n{"torn')
    synced: list[tuple[int, bytes]] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((os.fstat(fd).st_ino, path.read_bytes()))
    )
    with Journal(path) as journal:
        assert synced == [
            (path.stat().st_ino, b'{"event":"n"}\n'),
            (path.parent.stat().st_ino, b'{"event":"n"}\n'),
        ]
        journal.append({"event": "m"})
        assert synced[2:] == [(path.stat().st_ino, b'{"event":"n"}\n{"event":"m"}\n')]


def test_a_full_disk_is_named_by_its_file(path: Path) -> None:
    """A limit on the file size stands for the full disk. Closing tries the failed write again."""
    soft, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    journal = Journal(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, most))
    try:
        for use in (functools.partial(journal.append, {"event": "n"}), journal.close):
            with pytest.raises(OSError, match="too large") as found:
                use()
            assert found.value.filename == str(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, most))


# -- values that do not belong there

RELEASED = Path(__file__).parents[1] / "scenarios" / "journals" / "last_release"


@pytest.mark.parametrize(
    ("line", "keys", "value", "problem"),
    [
        (1, ("plan", "max_trials"), "12", ("plan.max_trials", "whole number", "'12'")),
        (1, ("plan",), ..., ("plan is missing",)),
        (2, ("trial", "kind"), "other", ("trial.kind", "profile, baseline, search")),
        (2, ("trial", "batch"), [1, 1, 1], ("trial.batch", "object")),
        (2, ("trial", "stage"), True, ("trial.stage", "whole number", "True")),
        (2, ("time_s",), 1e18, ("time_s", "1e+18")),
        (3, ("outcome", "warnings"), [1], ("outcome.warnings[0]", "text", "1")),
        (3, ("outcome", "profile", "num_params"), ..., ("profile.num_params is missing",)),
        (3, ("trial_id",), 99, ("99",)),
        (3, ("event",), "finals", ("reason is missing",)),
    ],
)
def test_a_value_that_does_not_belong_there_is_named_with_its_line(
    tmp_path: Path, line: int, keys: tuple[str, ...], value: Any, problem: tuple[str, ...]
) -> None:
    shutil.copytree(RELEASED, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "run" / "journal.jsonl"
    events = read_events(path)
    *above, last = keys
    inner = events[line - 1]
    for key in above:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    before = path.read_bytes()
    told = User(tmp_path).types("show", "run")
    assert told.status in (1, 2) and "Traceback" not in told.err
    assert f"line {line} of" in told.err and "journal.jsonl" in told.err
    assert all(word in told.err for word in problem), told.err
    assert path.read_bytes() == before


@pytest.mark.slow  # it asks DeepSpeed
def test_options_that_another_version_of_deepspeed_has_are_compared(tmp_path: Path) -> None:
    """If a default has changed since, the earlier measurements no longer apply."""
    shutil.copytree(RELEASED, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "run" / "journal.jsonl"
    key = "zero_optimization.offload_optimizer.pin_memory"
    text = path.read_text()
    assert f'"{key}":true' in text
    user = User(tmp_path, World(at_once=2))
    path.write_text(text.replace(f'"{key}":true', f'"{key}":false'))
    told = user.tunes("--max-trials", 12, "--resume", method="asha")
    assert told.status == 2 and "Cannot resume" in told.err
    assert key in told.err and "false" in told.err and "true" in told.err
    # A setting that is newer than a run is not searched in it, and does not end it.
    path.write_text(text.replace(f'"{key}":true,', ""))
    told = user.tunes("--max-trials", 14, "--resume", method="asha")
    assert told.status == 0 and len(told.trials) > 11
