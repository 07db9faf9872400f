"""Finds runs on the disk and reads them, whether they are over or still going on."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from dsat.app.folder_lock import is_locked
from dsat.app.run_folders import RUNS_FOLDER
from dsat.errors import JournalError, UserInputError
from dsat.run.history import read_run
from dsat.run.journal import FILE_NAME
from dsat.run.run import Run

_RESULTS_FOLDER = Path("autotuning_results")  # where `dsat tune` writes by default
_DATE = re.compile(rb'"time_s": ?(\d{1,10}(?:\.\d+)?)[,}]')
_TAIL_BYTES = 4096  # the date is the end of an event


@dataclass(frozen=True)
class PastRun:
    """A run, read from its folder.

    Attributes:
        goes_on: a process works on it.
        changed_s: when something last happened, in seconds since the epoch.
    """

    folder: Path
    run: Run
    goes_on: bool
    changed_s: float

    @property
    def trials(self) -> Path:
        """Folder of its trials."""
        below = self.folder / "trials"
        return below if below.is_dir() else self.folder

    @property
    def state(self) -> str:
        """`goes on`, `interrupted`, `over` or `failed`."""
        if self.run.stop_reason is not None:  # its process may still train in full length
            return "over" if self.run.best is not None else "failed"
        return "goes on" if self.goes_on else "interrupted"


def folders(above: Path | None = None) -> list[Path]:
    """Return the folders of runs right below another one, the newest first.

    Args:
        above: by default `dsat_runs`, and with it the results of `dsat tune`.
    """
    candidates = [_RESULTS_FOLDER] if above is None else [above]
    below = RUNS_FOLDER if above is None else above
    candidates += sorted(below.iterdir()) if below.is_dir() else []
    found = [path for path in candidates if os.path.isfile(path / FILE_NAME)]
    return sorted(found, key=lambda path: _changed_s(path / FILE_NAME), reverse=True)


def _changed_s(journal: Path) -> float:
    """Return when something last happened, by the end of a journal; else the date of its file."""
    stat = journal.stat()
    with contextlib.suppress(OSError), open(journal, "rb") as file:
        file.seek(max(0, stat.st_size - _TAIL_BYTES))
        dates = [float(date) for date in _DATE.findall(file.read())]
        if dates and dates[-1] <= time.time():  # not by a clock that was wrong
            return dates[-1]
    return stat.st_mtime


def load(path: Path | None = None) -> PastRun:
    """Read a run.

    Args:
        path: its folder, or the folder's name in `dsat_runs`; by default the newest run.

    Raises:
        UserInputError: there is no such run.
        JournalError: its journal is damaged.
    """
    folder = find(path)
    run = read_run(folder / FILE_NAME)
    if not run.has_begun:
        raise UserInputError("has not begun yet", where=str(folder))
    goes_on = is_locked(folder)
    run.paused = not goes_on  # also if it was killed
    return PastRun(folder, run, goes_on, _changed_s(folder / FILE_NAME))


def load_all(above: Path | None = None) -> tuple[list[PastRun], list[str]]:
    """Return all runs right below a folder, the newest first, and why others cannot be read.

    Raises:
        UserInputError: there is no such folder.
    """
    if above is not None and not above.is_dir():
        raise UserInputError("is not a folder", where=str(above))
    found, unread = [], []
    for folder in folders(above):
        try:
            found.append(load(folder))
        except (JournalError, UserInputError, OSError) as error:
            unread.append(str(error))
    return found, unread


def find(path: Path | None) -> Path:
    """Return the folder of a run; see `load`.

    Raises:
        UserInputError: there is no such run.
    """
    if path is None:
        newest = folders()
        if not newest:
            raise UserInputError(
                f"there is no run in {RUNS_FOLDER}",
                hint="Name a run's folder, or go to where the search was started.",
            )
        return newest[0]
    for folder in (path, RUNS_FOLDER / path):
        if (folder / FILE_NAME).is_file():
            return folder
    raise UserInputError(
        "is no run", where=str(path), hint="`dsat runs` lists those that there are."
    )
