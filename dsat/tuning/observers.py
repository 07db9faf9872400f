"""Observers of a run: the log, and the result files."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from dsat.run.loop import Observer
from dsat.run.run import Run
from dsat.show import page, summary
from dsat.show.log_lines import Kind
from dsat.show.view import RunView
from dsat.tuning import autotuner_files, train_command
from dsat.tuning.preparation import Prepared
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial

_log = logging.getLogger(__name__)
TRIALS = "dsat.trials"
_log_of_trials = logging.getLogger(TRIALS)
_PAGE_EVERY_S = 30.0


def log_line(kind: Kind, text: str) -> None:
    """Log a line; trials have their own logger, because a table may show them instead."""
    log = _log_of_trials if kind is Kind.TRIAL else _log
    log.log(logging.WARNING if kind is Kind.WARNING else logging.INFO, "%s", text)


class FileKeeper(Observer):
    """Update result files at a new best, and the report every 30 s."""

    def __init__(self, ready: Prepared, folder: Path) -> None:
        self._ready = ready
        self._folder = folder
        self._page_is_due_s = time.monotonic() + _PAGE_EVERY_S

    def ended(self, run: Run, trial: Trial, outcome: Outcome) -> None:
        is_due = time.monotonic() >= self._page_is_due_s
        if is_due:
            self._page_is_due_s = time.monotonic() + _PAGE_EVERY_S
        if trial is run.best or is_due:
            write_files(self._ready, run, self._folder, with_page=is_due)


def write_files(ready: Prepared, run: Run, folder: Path, *, with_page: bool = True) -> None:
    """Write the result files."""
    view, line = RunView.build(run), train_command.make_line(ready, run, folder)
    summary.write_files(view, folder, line)
    train_command.write_own_files(ready, run, folder)
    if with_page:
        page.write_page(view, folder, line)
    section = ready.section
    if section is not None:
        results = section.results_dir or folder
        best = results / autotuner_files.OPTIMAL_CONFIG_FILE
        command = train_command.make_command(ready, run, best) or ""
        autotuner_files.write_files(view, results, section.exps_dir, command)
