"""Folders of a run."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dsat.errors import JournalError, UserInputError
from dsat.run import history
from dsat.run.folder_lock import FolderLock
from dsat.run.journal import FILE_NAME, RUNS_FOLDER, read_events
from dsat.run.run import Run
from dsat.run.tuner import difference_to
from dsat.show import page, progress, summary
from dsat.space.plan import Plan
from dsat.tuning import autotuner_files
from dsat.tuning.autotuning_section import Section
from dsat.tuning.settings import Settings
from dsat.values.files import PRIVATE_FOLDER, write_atomically
from dsat.values.outcome import OutcomeKind

_log = logging.getLogger(__name__)
_RESULT_FILES = (
    autotuner_files.OPTIMAL_CONFIG_FILE,
    autotuner_files.OPTIMAL_COMMAND_FILE,
    autotuner_files.SUMMARY_FILE,
    page.PAGE_FILE,
    progress.STATUS_FILE,
    summary.BEST_CONFIG_FILE,
    summary.BEST_METRICS_FILE,
    summary.SUMMARY_FILE,
    "supervisor.log",
)


def of_run(settings: Settings, name: str, locks: ExitStack) -> Path:
    """Return the folder of the run: a new one, or the one to continue."""
    folder = check(settings, name) or _new_folder(_stem(name))
    locks.callback(FolderLock(folder).close)
    return folder


def check(settings: Settings, name: str) -> Path | None:
    """Return the folder that the settings name; None for a new one. Change nothing.

    Raises:
        UserInputError: the folder holds another run, or none to resume, or cannot be made.
    """
    folder = settings.run_dir
    if folder is None and settings.resume:
        stem = _stem(name)
        numbers = [n for n in _numbers(stem) if (RUNS_FOLDER / f"{stem}-{n}" / FILE_NAME).exists()]
        if not numbers:
            raise UserInputError(
                f"there is no run {RUNS_FOLDER / stem}-* to resume", where="--resume"
            )
        folder = RUNS_FOLDER / f"{stem}-{max(numbers)}"
    elif folder is not None and (folder / FILE_NAME).exists() is not settings.resume:
        if settings.resume:
            raise UserInputError("holds no run to resume", where=str(folder))
        raise UserInputError(
            "already holds a run",
            where=str(folder),
            hint="Add --resume to continue it, or choose another folder.",
        )
    if folder is not None and not settings.resume and (folder / summary.SUMMARY_FILE).exists():
        raise UserInputError(
            "holds the results of another search, which has no journal here",
            where=str(folder),
            hint="Choose another folder.",
        )
    _check_can_be_made(RUNS_FOLDER if folder is None else folder)
    return folder


def _check_can_be_made(folder: Path) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        problem = "may not be written to" if os.path.isdir(there) else "is not a folder"
        raise UserInputError(problem, where=str(there), hint="Name another folder by --run-dir.")


def _stem(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:80]


def _numbers(stem: str) -> list[int]:
    """Return the numbers of the runs of a name."""
    return [
        int(suffix)
        for path in RUNS_FOLDER.glob(f"{glob.escape(stem)}-*")
        # Not every digit is a decimal one (²), and no number of ours has so many.
        if re.fullmatch("[0-9]{1,9}", suffix := path.name[len(stem) + 1 :])
    ]


def _new_folder(stem: str) -> Path:
    number = max(_numbers(stem), default=0) + 1
    while True:
        folder = RUNS_FOLDER / f"{stem}-{number}"
        try:
            RUNS_FOLDER.mkdir(exist_ok=True)
            folder.mkdir(mode=PRIVATE_FOLDER)
        except FileExistsError:
            number += 1
        else:
            return folder


def of_trials(section: Section | None, folder: Path) -> Path:
    """Return the folder of a run's trials: as DeepSpeed's autotuner has it in its own folder."""
    is_results_dir = section is not None and section.results_dir is not None
    return folder if is_results_dir else folder / "trials"


def of_results(results: Path, section: Section, locks: ExitStack) -> Path:
    """Return the folder of a run that the `autotuning` section names.

    Earlier results are deleted if the section says so: what dsat itself wrote, and nothing else.
    """
    experiments = section.exps_dir or results
    for folder in dict.fromkeys(path.resolve() for path in (results, experiments)):
        locks.callback(FolderLock(folder).close)
    if section.overwrite:
        _delete_results(results, experiments)
    return results


def earlier_runs(
    folder: Path, plan: Plan, info: Mapping[str, Any], *, takes_over: bool
) -> list[Run]:
    """Return the runs in a run's folder that are not continued.

    The journal of a run for another plan is set aside. So is that of a run with errors to retry, or
    that would go on with another script or other software: a new journal begins, and whatever still
    counts is taken from the old one.

    Args:
        takes_over: the folder may hold a run of another plan.
    """
    journal = folder / FILE_NAME
    if journal.exists():
        events = read_events(journal)
        run = Run(events, name=str(journal))
        other = difference_to(plan, run.plan) if run.has_begun else None
        changed = history.difference(run, plan, info) if run.has_begun else None
        goes_on = changed is not None and not _is_over(run, plan)
        if takes_over if other else goes_on or _has_errors_to_retry(run):
            _set_aside(journal)
            if changed is not None:
                _log.info(
                    "%s: the search begins again without what was measured before the change",
                    changed,
                )
            elif other:
                _log.info("%s: a new search begins and reuses what was measured", other)
            else:
                _log.info("trials that failed are run again")
    return [history.read_run(path) for path in _set_aside_in(folder)]


def _set_aside(journal: Path) -> None:
    """Copy a journal and empty it: there is one to resume whenever this process is killed."""
    number = 1
    while (aside := journal.with_name(f"{journal.stem}-{number}.jsonl")).exists():
        number += 1
    write_atomically(aside, journal.read_text(encoding="utf-8"))
    write_atomically(journal, "")


def _set_aside_in(folder: Path) -> list[Path]:
    """Return the journals that were set aside, by their numbers."""
    found = folder.glob(f"{Path(FILE_NAME).stem}-*.jsonl")
    return sorted(found, key=lambda path: (len(path.name), path.name))


def _is_over(run: Run, plan: Plan) -> bool:
    """Check for a run that found something and has no trial left by a plan."""
    stopped = run.stop_reason is not None
    decided = run.finals is not None or plan.finals == run.plan.finals
    return stopped and decided and run.best is not None and plan.max_trials <= run.plan.max_trials


def _has_errors_to_retry(run: Run) -> bool:
    """Check for errors in a run that found nothing, or was interrupted before its finals.

    Where something ran, other failures would only repeat: what DeepSpeed refuses, what takes too
    long or too much of the host's memory, a loss that is no number.
    """
    kinds = {outcome.kind for outcome in run.outcomes.values()}
    if run.best is None:
        return not kinds <= {OutcomeKind.OK, OutcomeKind.OOM, OutcomeKind.CANCELED}
    return OutcomeKind.ERROR in kinds and run.stop_reason is None and run.finals is None


def _delete_results(results: Path, experiments: Path) -> None:
    """Delete the results, and the trials that the journals name; all else stays."""
    journals = [results / FILE_NAME, *_set_aside_in(results)]
    journals = [path for path in journals if path.is_file()]
    for journal in journals:
        with contextlib.suppress(JournalError):  # a damaged one names no trials
            for trial in history.read_run(journal).trials.values():
                shutil.rmtree(results / trial.name, ignore_errors=True)  # follows no link
                (experiments / f"{trial.name}.json").unlink(missing_ok=True)
    ours = [results / name for name in _RESULT_FILES] if journals else []
    for path in [*ours, *journals]:  # the journals last: they name the trials
        path.unlink(missing_ok=True)
