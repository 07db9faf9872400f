"""Runs on disk: finished, interrupted or running."""

from __future__ import annotations

import contextlib
import stat
from dataclasses import dataclass
from pathlib import Path

from dsat.engines.trial_folder import TRIALS_FOLDER
from dsat.errors import JournalError, UserInputError
from dsat.run.folder_lock import is_locked
from dsat.run.history import read_run
from dsat.run.journal import FILE_NAME, RUNS_FOLDER
from dsat.run.run import Run
from dsat.show.view import RunView


@dataclass(frozen=True)
class PastRun:
    """A run, read from its folder.

    Attributes:
        changed_s: time of the journal's last change, in seconds since the epoch.
    """

    folder: Path
    run: Run
    is_running: bool
    changed_s: float

    @property
    def trials(self) -> Path:
        folder = self.folder / TRIALS_FOLDER
        return folder if folder.is_dir() else self.folder

    @property
    def state(self) -> str:
        """State of the run: `running`, `interrupted`, `finished` or `failed`."""
        if self.run.stop_reason is not None:  # its process may still train in full length
            return "finished" if self.run.best is not None else "failed"
        return "running" if self.is_running else "interrupted"


def folders(above: Path | None = None) -> list[Path]:
    """Return run folders, newest first: `above` and those in it; by default all in `dsat_runs`."""
    folder = RUNS_FOLDER if above is None else above
    candidates = sorted(folder.iterdir()) if folder.is_dir() else []
    runs = [folder for folder in candidates if _is_of_run(folder, if_hidden=above is None)]
    if above is not None and _is_of_run(above, if_hidden=True):
        runs.append(above)
    return sorted(runs, key=changed_s, reverse=True)


def _is_of_run(folder: Path, *, if_hidden: bool) -> bool:
    """Return whether a folder has a journal, or `if_hidden` if permissions prevent the check."""
    try:
        return stat.S_ISREG((folder / FILE_NAME).stat().st_mode)
    except (OSError, ValueError) as error:
        return if_hidden and isinstance(error, PermissionError)


def changed_s(folder: Path) -> float:
    """Return the time of the journal's last change, in seconds since the epoch; 0 if unknown."""
    with contextlib.suppress(PermissionError):
        return (folder / FILE_NAME).stat().st_mtime
    return 0.0


def load(path: Path | None = None) -> PastRun:
    """Read a run.

    Args:
        path: the run's folder, or that folder's name in `dsat_runs`; None for the newest run.

    Raises:
        UserInputError: there is no such run, or it has not begun.
        JournalError: its journal is damaged.
    """
    folder = find(path)
    run = read_run(folder / FILE_NAME)
    if not run.has_begun:
        raise UserInputError("has not begun yet", where=str(folder))
    is_running = is_locked(folder)
    run.paused = not is_running  # also if it was killed
    return PastRun(folder, run, is_running, changed_s(folder))


def load_all(above: Path | None = None) -> tuple[list[tuple[PastRun, RunView]], list[str]]:
    """Return the runs of `folders(above)`, newest first, and why others cannot be shown.

    Raises UserInputError if `above` is not a folder.
    """
    if above is not None and not above.is_dir():
        raise UserInputError(
            "is not a folder", where=str(above), hint="Name a folder of runs, such as dsat_runs."
        )
    runs, unread = [], []
    for folder in folders(above):
        try:
            past = load(folder)
            runs.append((past, RunView(past.run)))
        except (JournalError, UserInputError, OSError) as error:
            unread.append(str(error))
        except Exception as error:  # values that this version cannot show
            unread.append(f"{folder}: cannot be shown ({type(error).__name__}: {error})")
    return runs, unread


def find(path: Path | None) -> Path:
    """Return the folder of a run; see `load`. Raises UserInputError if there is none."""
    if path is None:
        newest = folders()
        if not newest:
            raise UserInputError(
                f"there is no run in {RUNS_FOLDER}",
                hint="Name a run's folder, or go to where the search was started.",
            )
        return newest[0]
    for folder in (path, RUNS_FOLDER / path):
        if _is_of_run(folder, if_hidden=True):
            return folder
    raise UserInputError(
        "there is no such run", where=str(path), hint="`dsat runs` lists all runs."
    )
