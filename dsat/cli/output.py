"""Output of the command line: log messages, results and errors."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsat import __version__
from dsat.cli import EXIT_BUG, EXIT_FAILED, EXIT_USAGE
from dsat.errors import DsatError, JournalMismatch, SearchFailed, UserInputError
from dsat.show import summary, terminal
from dsat.show.live import LiveView
from dsat.show.view import RunView
from dsat.tuning import train_command
from dsat.tuning.local import TRIALS, LocalSearch
from dsat.tuning.preparation import Prepared
from dsat.values.text import MOST_OF_A_LOG, hide_secrets_in_values, printable, shell_line


class _Handler(logging.Handler):
    """Logging handler that prints dsat's messages above the live table."""

    def __init__(self, view: LiveView) -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == TRIALS and self._view.is_live:
            return  # the table shows the trials
        text = printable(record.getMessage())
        self._view.say(f"warning: {text}" if record.levelno >= logging.WARNING else text)


@contextlib.contextmanager
def messages_to(view: LiveView) -> Iterator[None]:
    """While the context is open, show the messages that dsat logs in the live view."""
    log, handler = logging.getLogger("dsat"), _Handler(view)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def print_json(value: Any) -> None:
    """Print a result as JSON, with `***` in place of values that look like secrets."""
    print(json.dumps(hide_secrets_in_values(value), indent=2), flush=True)


def result_of(search: LocalSearch) -> Iterator[terminal.Part]:
    """Yield the verdict and, if there is a best trial, its configuration file and how to train."""
    run, ready = search.run, search.ready
    if run.outcomes:
        yield from terminal.describe_result(RunView(run))
    if run.best is None:
        return
    yield f"Configuration: {search.folder / summary.BEST_CONFIG_FILE}"
    ranks = ready.program.slots or 1
    trains_itself = ready.program.started_by and ready.plan.slots_per_trial == ranks
    if run.best is run.baseline and trains_itself:
        if not ready.machine.is_cpu:
            yield "Train with your own command: it has this configuration already."
            return
        yield (
            "Your own command has this configuration already. The command below also sets threads "
            "and cores as in the trials."
        )
    yield f"Train with it: {train_command.make_line(ready, run, search.folder)}"


def how_to_continue(ready: Prepared, folder: Path) -> str:
    """Return a line with the command that continues an interrupted run."""
    assert ready.line is not None
    words = [train_command.find_program("dsat"), *ready.line.resumed(folder)]
    return f"Continue with: {shell_line(words, folder)}"


def report(error: Exception) -> int:
    """Print an error, after the script's traceback if known; return the exit status."""
    if isinstance(error, OSError):
        error = DsatError.convert_os_error(error)
    if not isinstance(error, DsatError):
        return report_bug(error)
    if isinstance(error, SearchFailed) and error.detail:
        print(printable(error.detail.rstrip(), MOST_OF_A_LOG), file=sys.stderr)
    print(f"dsat: error: {printable(str(error))}", file=sys.stderr)
    return EXIT_USAGE if isinstance(error, (UserInputError, JournalMismatch)) else EXIT_FAILED


def report_bug(error: Exception) -> int:
    """Print an unexpected exception with its traceback; return the exit status of a bug."""
    print(printable("".join(traceback.format_exception(error)), MOST_OF_A_LOG), file=sys.stderr)
    print(
        f"dsat: error: this is a bug in dsat {__version__}. Please report it with the lines above",
        file=sys.stderr,
    )
    return EXIT_BUG
