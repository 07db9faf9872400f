"""The durable record of a run: an append-only, fsynced file of JSON lines.

An event is on disk before it takes effect, so a kill between any two statements of the program
loses nothing. An incomplete last line is cut off when the journal is opened again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsat.errors import JournalError
from dsat.values.files import PRIVATE_FILE, sync_folder

SCHEMA_VERSION = 1
FILE_NAME = "journal.jsonl"
ENGINE = "engine"  # key in the first line's info: the trials' engine, unless they run here
RUNS_FOLDER = Path("dsat_runs")


class Journal:
    """An open journal; the caller's `FolderLock` must keep other processes away.

    Args:
        path: the file, which is created if it is missing; its folder must exist.

    Raises:
        JournalError: a complete line is damaged, or a newer dsat wrote the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = open(os.open(path, flags, PRIVATE_FILE), "a+b")  # noqa: SIM115
        try:
            self._file.seek(0)
            self.events, intact = parse(self._file.read(), str(path))
        except JournalError:
            self._file.close()
            raise
        self._file.truncate(intact)
        self._sync()
        sync_folder(path.parent)

    def append(self, event: Mapping[str, Any]) -> None:
        """Write one event and wait until it is on disk."""
        line = to_text([event])
        with self._named_in_errors():
            self._file.write(line.encode())
            self._sync()

    def close(self) -> None:
        with self._named_in_errors():
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            raise

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


class MemoryJournal:
    """A journal without a file, for callers that store the events themselves.

    Appended events are converted to JSON and back, as if read from a file.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.events: list[dict[str, Any]] = [dict(event) for event in events]

    def append(self, event: Mapping[str, Any]) -> None:
        self.events.append(json.loads(json.dumps(event, allow_nan=False)))


def to_text(events: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a journal, or of its next lines."""
    lines = (json.dumps(each, separators=(",", ":"), allow_nan=False) for each in events)
    return "".join(f"{line}\n" for line in lines)


def parse(content: bytes, name: str) -> tuple[list[dict[str, Any]], int]:
    """Parse the content of a journal; the caller checks the values of events.

    Returns:
        The events, and the number of bytes up to the end of the last complete line.

    Raises:
        JournalError: a complete line is not an event, or has a newer schema than this dsat.
    """
    events: list[dict[str, Any]] = []
    intact = 0
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict) or "event" not in event:
                raise ValueError
            is_newer = event.get("schema", 0) > SCHEMA_VERSION
            if b"\\ud" in line.lower():  # allow only bytes of a path that are not UTF-8
                json.dumps(event, ensure_ascii=False).encode("utf-8", "surrogateescape")
        except (ValueError, TypeError, RecursionError):
            raise JournalError(
                f"{name}: line {number} is damaged, or the file is not the journal of a run. Start "
                "a new run, or restore the file."
            ) from None
        if is_newer:
            raise JournalError(
                f"{name}: written by a newer dsat (schema {event['schema']}, this one reads up to "
                f"{SCHEMA_VERSION}). Update dsat, or start a new run."
            )
        events.append(event)
        intact += len(line) + 1
    return events, intact


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a journal without locking it; another process may be writing it."""
    return parse(path.read_bytes(), str(path))[0]
