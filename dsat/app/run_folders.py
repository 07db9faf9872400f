"""Where a run keeps its files."""

from __future__ import annotations

import shutil
from pathlib import Path

from dsat.app.prepare import Prepared
from dsat.errors import UserInputError
from dsat.inputs.autotuning_section import Autotuning
from dsat.inputs.settings import Settings
from dsat.report import autotuner_files
from dsat.space.plan import Plan
from dsat.tuning.journal import FILE_NAME, read_events
from dsat.tuning.run import Run

RUNS_FOLDER = Path("dsat_runs")


def of_run(settings: Settings, name: str) -> Path:
    """The folder of the run: a new one, or the one to continue."""
    if settings.run_dir is not None:
        holds_run = (settings.run_dir / FILE_NAME).exists()
        if settings.resume and not holds_run:
            raise UserInputError("holds no run to resume", where=str(settings.run_dir))
        if holds_run and not settings.resume:
            raise UserInputError(
                "already holds a run",
                where=str(settings.run_dir),
                hint="Add --resume to continue it, or choose another folder.",
            )
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        return settings.run_dir
    stem = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    numbers = [
        int(path.name[len(stem) + 1 :])
        for path in RUNS_FOLDER.glob(f"{stem}-*")
        if path.name[len(stem) + 1 :].isdigit()
    ]
    if settings.resume:
        if not numbers:
            raise UserInputError(
                f"there is no run {RUNS_FOLDER / stem}-* to resume", where="--resume"
            )
        return RUNS_FOLDER / f"{stem}-{max(numbers)}"
    number = max(numbers, default=0) + 1
    while True:
        folder = RUNS_FOLDER / f"{stem}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def of_trials(ready: Prepared, folder: Path) -> Path:
    """Where the trials of a run have their folders."""
    return folder if ready.native is not None else folder / "trials"


def of_results(section: Autotuning) -> Path:
    """The folder of a run under the names of DeepSpeed's autotuner, to begin or to continue.

    Earlier results are deleted if the section says so, and only if they are an autotuner's.

    Raises:
        UserInputError: what is to be deleted is something else.
    """
    if section.overwrite:
        results = (FILE_NAME, autotuner_files.SUMMARY_FILE, "profile_model_info")
        _delete(section.results_dir, "results_dir", results)
        _delete(section.exps_dir, "exps_dir", ("*.json",))
    section.results_dir.mkdir(parents=True, exist_ok=True)
    return section.results_dir


def earlier_runs(folder: Path, plan: Plan) -> list[Run]:
    """The runs in a folder of results, none of which a run of another plan continues.

    The journal of a run that was made for another plan is put aside.
    """
    journal = folder / FILE_NAME
    if journal.exists():
        run = Run(read_events(journal))
        if run.plan is not None and plan.difference(run.plan) is not None:
            number = 1
            while (aside := folder / f"{journal.stem}-{number}.jsonl").exists():
                number += 1
            journal.rename(aside)
    return [Run(read_events(path)) for path in sorted(folder.glob(f"{journal.stem}-*.jsonl"))]


def _delete(folder: Path, key: str, marks: tuple[str, ...]) -> None:
    if not folder.exists():
        return
    where = f"autotuning.{key}: {folder}"
    whole = folder.resolve()
    if not folder.is_dir() or Path.cwd().resolve().is_relative_to(whole):
        raise UserInputError(
            "is not a folder of results, and overwrite would delete it",
            where=where,
            hint="Name another folder.",
        )
    if any(folder.iterdir()) and not any(list(folder.glob(mark)) for mark in marks):
        raise UserInputError(
            "holds no results of an autotuner, and overwrite would delete it",
            where=where,
            hint="Name another folder, or delete it yourself.",
        )
    shutil.rmtree(folder)
