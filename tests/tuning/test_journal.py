from __future__ import annotations

import functools
import json
import os
import random
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.errors import JournalError, JournalLocked
from dsat.report import summary
from dsat.report.run_view import RunView
from dsat.space.plan import Plan
from dsat.tuning.journal import SCHEMA_VERSION, Journal, MemoryJournal, read_events
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.files import write_atomically, written_atomically
from testing.helpers import FakeClock, World, drive, plan_of

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
    """For tests that open a journal hundreds of times; none of them pulls the plug."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def _write(path: Path) -> bytes:
    with Journal(path) as journal:
        for event in EVENTS:
            journal.append(event)
    return path.read_bytes()


def _in_another_process(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys\nfrom dsat.tuning.journal import *\n{code}", str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )


def test_what_was_appended_is_read_again(path: Path) -> None:
    content = _write(path)
    assert content.count(b"\n") == len(EVENTS), "one line each"
    with Journal(path) as journal:
        assert journal.events == EVENTS
    assert read_events(path) == EVENTS
    assert path.read_bytes() == content


def test_a_new_journal_is_empty(path: Path) -> None:
    with Journal(path) as journal:
        assert journal.events == []


@pytest.mark.usefixtures("_fast_disk")
def test_cut_off_at_any_byte_it_keeps_the_complete_lines(path: Path) -> None:
    content = _write(path)
    more = {"event": "more"}
    for length in random.Random(1).sample(range(len(content) + 1), 40):
        path.write_bytes(content[:length])
        complete = content[:length].count(b"\n")
        assert read_events(path) == EVENTS[:complete]
        assert path.stat().st_size == length, "a reader changes nothing"
        with Journal(path) as journal:
            assert journal.events == EVENTS[:complete]
            journal.append(more)
        assert read_events(path) == [*EVENTS[:complete], more]


def test_a_torn_tail_is_cut_off_at_opening(path: Path) -> None:
    content = _write(path)
    path.write_bytes(content + b'{"event": "fini')
    Journal(path).close()
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b'{"event": ', b"\x00\x00\x00", b"\xff\xfe", b"[1]", b"3", b"null", b'{"a":1}'],
)
@pytest.mark.parametrize("line", [1, 2, 3])
def test_a_damaged_line_is_named(path: Path, line: int, damage: bytes) -> None:
    lines = _write(path).split(b"\n")
    lines[line - 1] = damage
    content = b"\n".join(lines)
    path.write_bytes(content)
    with pytest.raises(JournalError, match=rf"journal\.jsonl: line {line} is damaged"):
        Journal(path)
    with pytest.raises(JournalError, match=f"line {line} is damaged"):
        read_events(path)
    assert path.read_bytes() == content, "nothing is cut off that a person may want to mend"


def test_a_journal_of_a_newer_dsat_is_left_alone(path: Path) -> None:
    content = json.dumps({"event": "start", "schema": SCHEMA_VERSION + 1}).encode() + b"\n{"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=rf"newer dsat \(schema {SCHEMA_VERSION + 1}"):
        Journal(path)
    assert path.read_bytes() == content


def test_a_failed_opening_leaves_no_lock(path: Path) -> None:
    content = _write(path)
    path.write_bytes(b"damage\n" + content)
    with pytest.raises(JournalError):
        Journal(path)
    path.write_bytes(content)
    Journal(path).close()


def test_what_json_cannot_hold_is_refused_and_leaves_no_trace(path: Path) -> None:
    content = _write(path)
    with Journal(path) as journal:
        with pytest.raises(ValueError, match="JSON"):
            journal.append({"event": "third", "value": float("nan")})
        journal.append({"event": "next"})
    assert path.read_bytes() == content + b'{"event":"next"}\n'


def test_an_event_is_on_the_disk_when_append_returns(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    with Journal(path) as journal:
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes()))
        journal.append({"event": "n"})
        assert synced == [b'{"event":"n"}\n']
        journal.append({"event": "m"})
        assert synced[1:] == [b'{"event":"n"}\n{"event":"m"}\n']


def test_a_full_disk_is_named_by_its_file(path: Path) -> None:
    """Here a limit on the size of files; what could not be written is tried again at the end."""
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


def test_the_cut_and_the_name_of_the_file_are_on_the_disk_when_it_is_open(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(b'{"event":"n"}\n{"torn')
    synced: list[tuple[int, bytes]] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((os.fstat(fd).st_ino, path.read_bytes()))
    )
    Journal(path).close()
    assert synced == [
        (path.stat().st_ino, b'{"event":"n"}\n'),
        (path.parent.stat().st_ino, b'{"event":"n"}\n'),
    ]


# -- the lock


def test_a_second_opening_in_the_same_process_is_refused(path: Path) -> None:
    with Journal(path) as journal:
        with pytest.raises(JournalLocked, match="another dsat process"):
            Journal(path)
        journal.append({"event": "n"})
        assert read_events(path) == [{"event": "n"}], "a reader takes no lock"
    Journal(path).close()


def test_a_second_opening_in_another_process_is_refused(path: Path) -> None:
    with Journal(path):
        other = _in_another_process("Journal(sys.argv[1])", path)
    assert other.returncode == 1
    assert "dsat.errors.JournalLocked" in other.stderr


def test_the_lock_dies_with_its_process(path: Path) -> None:
    code = (
        "import os, pathlib, signal\n"
        "journal = Journal(pathlib.Path(sys.argv[1]))\n"
        "journal.append({'event': 'n'})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert _in_another_process(code, path).returncode == -9
    with Journal(path) as journal:
        assert journal.events == [{"event": "n"}]


# -- a tuner's own journal


def _tune(path: Path, plan: Plan) -> bytes:
    with Journal(path) as journal:
        tuner = Tuner(plan, journal, events=journal.events, clock=FakeClock())
        drive(tuner, World(), slots=2)
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("_fast_disk")
@pytest.mark.parametrize("method", ["asha", "binary", "random"])
def test_a_run_continues_from_lines_of_its_journal(path: Path, method: str) -> None:
    plan = plan_of(method, max_trials=9)
    whole = _tune(path, plan)
    ends = [0, *(n + 1 for n, byte in enumerate(whole) if byte == ord("\n"))]
    assert len(ends) > 15
    for begin, end in list(zip(ends, [*ends[1:], len(whole)], strict=True))[::3]:
        # Torn in the middle of the next line, as by a kill.
        path.write_bytes(whole[: (begin + end) // 2])
        assert _tune(path, plan) == whole


# -- files that others read


def test_write_atomically_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    for text in ("first, and longer", "zweitens: ä"):
        write_atomically(target, text)
        assert target.read_text(encoding="utf-8") == text
        assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_a_file_with_the_longest_name_is_written(tmp_path: Path) -> None:
    target = tmp_path / ("名" * 83 + ".html")
    write_atomically(target, "text")
    assert target.read_text() == "text"


def test_an_error_while_a_file_is_written_keeps_what_it_says(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.mkdir()
    with pytest.raises(IsADirectoryError) as found:
        write_atomically(target, "text")
    assert str(found.value).endswith(f"directory: '{target}'")
    with pytest.raises(OSError, match=r"^without a number$"), written_atomically(tmp_path / "b"):
        raise OSError("without a number")


def test_write_atomically_shows_a_reader_the_old_text_until_the_new_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    seen: list[tuple[str, str]] = []

    def replace(source: Path, destination: Path) -> None:
        seen.append((target.read_text(), Path(source).read_text()))
        os.rename(source, destination)

    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    monkeypatch.setattr(os, "replace", replace)
    write_atomically(target, "new")
    assert seen == [("old", "new")]
    assert synced == [target.stat().st_ino, tmp_path.stat().st_ino]
    assert target.read_text() == "new"


# -- journals of earlier versions, made by them with the plan and the world of `testing.helpers`

JOURNALS = Path(__file__).parent / "journals"


def test_a_journal_without_fields_that_came_later_is_read() -> None:
    """Of the version before `Outcome.smaller_may_run`, `Trial.strategy` and half of `Plan`."""
    events = read_events(JOURNALS / "before_smaller_may_run.jsonl")
    assert "smaller_may_run" not in json.dumps(events)
    run = Run(events)
    assert run.plan.max_trials == len(run.outcomes) == 12
    assert run.stop_reason == "all 12 trials are done" and run.best is not None
    assert run.outcomes[run.best.id].smaller_may_run is False
    assert run.best.strategy == f"z{run.best.stage}"
    assert "all 12 trials are done" in summary.markdown(RunView.of(run), "train")


@pytest.mark.slow
def test_a_run_of_the_last_version_is_resumed_from_any_event() -> None:
    events = read_events(JOURNALS / "before_moves.jsonl")
    plan = plan_of("asha", max_trials=12)
    ids = [event["trial"]["id"] for event in events if event["event"] == "proposed"]
    for count in (*range(1, len(events), 5), len(events)):
        journal = MemoryJournal(events[:count])
        tuner = Tuner(plan, journal, events=events[:count], clock=FakeClock())
        drive(tuner, World(), slots=2)
        assert list(tuner.run.trials) == ids
        assert tuner.run.trials == Run(events).trials
        assert tuner.run.outcomes == Run(events).outcomes
    more = Tuner(replace(plan, max_trials=14), MemoryJournal(), events=events, clock=FakeClock())
    drive(more, World(), slots=2)
    assert len(more.run.outcomes) == 14


@pytest.mark.parametrize(
    ("line", "keys", "value", "problem"),
    [
        (1, ("plan", "max_trials"), "12", "plan.max_trials must be a whole number, not '12'"),
        (1, ("plan", "own_batch", "gas"), None, "plan.own_batch.gas must be a whole number"),
        (1, ("plan",), ..., "plan is missing"),
        (1, ("schema",), "1", "schema must be a whole number, not '1'"),
        (2, ("trial", "kind"), "other", "trial.kind must be one of profile, baseline, search"),
        (2, ("trial", "batch"), [1, 1, 1], "trial.batch must be an object"),
        (2, ("trial", "stage"), True, "trial.stage must be a whole number, not True"),
        (2, ("elapsed_s",), "soon", "elapsed_s must be a number"),
        (2, ("time_s",), 1e18, "time_s is no date: 1e+18"),
        (2, ("time_s",), -1, "time_s is no date: -1"),
        (3, ("outcome", "kind"), ["OK"], "outcome.kind must be a text"),
        (3, ("outcome", "kind"), ..., "outcome.kind is missing"),
        (3, ("outcome", "warnings"), [1], "outcome.warnings[0] must be a text, not 1"),
        (3, ("outcome", "profile", "num_params"), ..., "outcome.profile.num_params is missing"),
        (3, ("trial_id",), 99, "trial_id is 99, and there is no such trial before"),
        (3, ("trial_id",), {}, "trial_id must be a whole number"),
        (3, ("event",), "start", "plan is missing"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_line(
    path: Path, line: int, keys: tuple[str, ...], value: Any, problem: str
) -> None:
    lines = (JOURNALS / "before_moves.jsonl").read_text().splitlines()
    event = json.loads(lines[line - 1])
    *above, last = keys
    inner = event
    for key in above:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    path.write_text("\n".join([*lines[: line - 1], json.dumps(event), *lines[line:]]) + "\n")
    with pytest.raises(JournalError, match=re.escape(f"journal.jsonl: line {line}: {problem}")):
        read_events(path)


def test_a_field_that_a_later_version_added_is_ignored(path: Path) -> None:
    lines = (JOURNALS / "before_moves.jsonl").read_text().splitlines()
    later = [json.loads(line) for line in lines]
    for event in later:
        event["later"] = 1
        for key in ("plan", "trial", "outcome"):
            if key in event:
                event[key]["later"] = {"a": 1}
    path.write_text("".join(f"{json.dumps(event)}\n" for event in later))
    assert Run(read_events(path)).outcomes == Run(map(json.loads, lines)).outcomes


def test_finals_of_other_types_are_named_with_their_line(path: Path) -> None:
    lines = (JOURNALS / "before_moves.jsonl").read_text().splitlines()
    finals = {"event": "finals", "reason": "", "trials": 4, "indifference": 0.0, "leaders": ["1"]}
    path.write_text("\n".join([*lines, json.dumps(finals)]) + "\n")
    with pytest.raises(JournalError, match=rf"line {len(lines) + 1}: leaders\[0\] must be a whole"):
        read_events(path)
