"""Find, create and lock the folder of a run; collect earlier runs in it."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.command.own_files import COPIES_FOLDER
from dsat.engines.trial_folder import TRIALS_FOLDER
from dsat.errors import JournalError, UserInputError
from dsat.run import history
from dsat.run.folder_lock import FolderLock
from dsat.run.journal import ENGINE, FILE_NAME, RUNS_FOLDER
from dsat.run.run import Run
from dsat.run.tuner import difference_to
from dsat.show import past_runs, summary
from dsat.show.page import PAGE_FILE
from dsat.space.plan import Plan
from dsat.tuning.settings import Settings
from dsat.values.files import PRIVATE_FOLDER, write_atomically
from dsat.values.outcome import OutcomeKind

_log = logging.getLogger(__name__)
# Results in a run's folder, which each run replaces.
_RESULTS = (
    summary.BEST_CONFIG_FILE,
    summary.BEST_METRICS_FILE,
    summary.SUMMARY_FILE,
    summary.STATUS_FILE,
    PAGE_FILE,
    COPIES_FOLDER,
)
_OF_THE_ENGINE = (TRIALS_FOLDER, "simulation", "supervisor.log")  # what an engine writes there


def choose(settings: Settings, name: str, locks: ExitStack, plan: Plan | None = None) -> Path:
    """Return the locked folder of the run: a new one, or the one to continue."""
    folder = check(settings, name, plan) or _new_folder(_stem(name))
    locks.callback(FolderLock(folder).close)
    return folder


def check(settings: Settings, name: str, plan: Plan | None = None) -> Path | None:
    """Check and return the folder that the settings name; None for a new one.

    When resuming, a run of the same `plan` is preferred to newer runs.

    Raises:
        UserInputError: the folder holds another run, has none to resume, or cannot be written to.
    """
    folder = settings.run_dir
    if settings.resume:
        folder = _find_run(folder, name, plan)
    elif folder is not None and (folder / FILE_NAME).exists():
        raise UserInputError(
            "already holds a run",
            where=str(folder),
            hint="Add --resume to continue it, or choose another folder.",
        )
    elif folder is not None and (existing := _existing(folder, *_RESULTS, *_OF_THE_ENGINE)):
        raise UserInputError(
            f"contains {existing[0].name} already, which the run would replace",
            where=str(folder),
            hint="Choose another folder.",
        )
    check_can_be_made(folder or RUNS_FOLDER, "Name another folder with --run-dir.")
    return folder


def _existing(folder: Path, *names: str) -> list[Path]:
    return [path for name in names if os.path.lexists(path := folder / name)]


def _find_run(folder: Path | None, name: str, plan: Plan | None) -> Path:
    """Return the folder of the run to resume: `folder`, or else one with a run called `name`.

    Of several runs, the one that changed last is chosen, if possible with the same plan.
    """
    if folder is not None:
        if _read_run(folder) is None:
            raise UserInputError(
                "contains no run that this machine can resume",
                where=str(folder),
                hint="Name the folder of a run, or leave out --resume.",
            )
        return folder
    stem = _stem(name)
    runs = {}
    for number in sorted(_numbers(stem), reverse=True):
        path = RUNS_FOLDER / f"{stem}-{number}"
        with suppress(PermissionError):  # a run of another user
            if (run := _read_run(path)) is not None:
                runs[path] = run
    if not runs:
        raise UserInputError(
            f"there is no run {RUNS_FOLDER / stem}-* to resume",
            where="--resume",
            hint="Go to where the search was started, or name the run's folder with --run-dir.",
        )
    paths = sorted(runs, key=past_runs.changed_s, reverse=True)
    return next((path for path in paths if plan is not None and _fits(plan, runs[path])), paths[0])


def _fits(plan: Plan, run: Run) -> bool:
    return run.has_begun and difference_to(plan, run.plan) is None


def _read_run(folder: Path) -> Run | None:
    """Return the run in a folder; None without one, or for a search on a cluster.

    If the journal is damaged, the returned run is empty.
    """
    if not (folder / FILE_NAME).exists():
        return None
    try:
        run = history.read_run(folder / FILE_NAME)
    except JournalError:
        return Run()
    return None if ENGINE in run.info else run


def check_can_be_made(folder: Path, hint: str) -> None:
    """Raise UserInputError if a folder cannot be made or written to."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
        problem = "is not writable" if os.path.isdir(nearest) else "is not a folder"
        raise UserInputError(problem, where=str(nearest), hint=hint)


def _stem(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:80]


def _numbers(stem: str) -> list[int]:
    return [
        int(suffix)
        for path in RUNS_FOLDER.glob(f"{glob.escape(stem)}-*")
        # `isdigit` also accepts ², and no run has a number of ten digits.
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


def read(folder: Path) -> Run:
    """Return the run in a folder; one that has not begun if there is no journal."""
    journal = folder / FILE_NAME
    return history.read_run(journal) if journal.exists() else Run()


def keep_budget(run: Run, settings: Settings, plan: Plan) -> Plan:
    """Return a plan with the numbers of trials and finals of a resumed run, unless given anew."""
    if not run.has_begun:
        return plan
    budget: dict[str, Any] = {"max_trials": run.plan.max_trials, "finals": run.plan.finals}
    if len(run.trials) > run.plan.max_trials:  # by a version that did not count reused trials
        budget["max_trials"] += len(run.earlier)
    return replace(plan, **{name: budget[name] for name in budget if name not in settings.given})


def earlier_runs(folder: Path, run: Run, plan: Plan, info: Mapping[str, Any]) -> list[Run]:
    """Return earlier runs in a folder, whose trials may be reused.

    The journal of `run` is set aside if the run has errors to retry, or if it is unfinished and the
    script or software changed. The next journal then reuses the trials that are still valid.
    """
    journal = folder / FILE_NAME
    if _fits(plan, run):
        changed = history.difference(run, plan, info)
        if changed is not None and not _is_over(run, plan):
            _set_aside(journal, _existing(folder, *_RESULTS))
            _log.info("%s, so the search begins again without its earlier measurements", changed)
        elif _has_errors_to_retry(run, plan.max_trials):
            _set_aside(journal)
            _log.info("running the failed trials again")
    aside = sorted(
        folder.glob(f"{Path(FILE_NAME).stem}-*.jsonl"),
        key=lambda path: (len(path.name), path.name),  # by number
    )
    return [history.read_run(path) for path in aside]


def _set_aside(journal: Path, results: Sequence[Path] = ()) -> None:
    """Copy a journal, rename results, then empty the journal.

    If dsat is killed in between, the run can still resume.
    """
    number = 1
    while (aside := journal.with_name(f"{journal.stem}-{number}.jsonl")).exists():
        number += 1
    # A torn last line may not be UTF-8.
    write_atomically(aside, journal.read_text(encoding="utf-8", errors="surrogateescape"))
    for path in results:
        path.rename(path.with_name(f"{path.stem}-{number}{path.suffix}"))
    write_atomically(journal, "")


def _is_over(run: Run, plan: Plan) -> bool:
    stopped = run.stop_reason is not None
    decided = run.finals is not None or plan.finals == run.plan.finals
    return stopped and decided and run.best is not None and plan.max_trials <= run.plan.max_trials


def _has_errors_to_retry(run: Run, max_trials: int) -> bool:
    """Return whether failed trials of a run should be retried.

    If the run has no result, every failure except device OOM is retried. If it has one, only errors
    are retried (refusals by DeepSpeed, timeouts, OOM and non-finite losses would happen again), and
    only before the finals and the end of the run, while the budget allows trials.
    """
    kinds = {outcome.kind for outcome in run.outcomes.values()}
    if run.best is None:
        return not kinds <= {OutcomeKind.OK, OutcomeKind.OOM, OutcomeKind.CANCELED}
    is_over = run.stop_reason is not None or run.finals is not None
    return OutcomeKind.ERROR in kinds and not is_over and len(run.outcomes) < max_trials
