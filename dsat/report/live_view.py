"""Live view of a run: lines, and below them a table of its trials."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from dsat.report import progress, terminal
from dsat.report.run_view import RunView
from dsat.report.table import Table
from dsat.run.loop import Observer
from dsat.run.run import Run
from dsat.values.trial import Trial

_LAST_TRIALS = 12


class LiveView(Observer):
    """Prints lines, and shows a run in a table while it goes on.

    Args:
        stream: where to; a table only if it is a terminal.
    """

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._console = terminal.console(stream)
        self._live = Live(console=self._console, auto_refresh=False) if stream.isatty() else None
        self._trials, self._folder = Path(), Path()

    def follow(self, folder: Path, trials: Path) -> None:
        """Show a run that begins."""
        self._folder, self._trials = folder, trials

    @property
    def shows_trials(self) -> bool:
        """Check for a live table."""
        return self._live is not None

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, *lines: str) -> None:
        """Print lines above the table."""
        for line in lines:
            self._console.print(Text(line))

    def waited(self, run: Run) -> None:
        if self._live is not None and run.has_begun:
            self._live.update(self._view(run), refresh=True)

    def show_result(self, run: Run) -> None:
        """Print the verdict and the final table."""
        if run.outcomes:
            for each in terminal.result(RunView.of(run)):
                self._console.print(each)

    def _view(self, run: Run) -> Group:
        view = RunView.of(run)
        cells = [
            (each.label, each.result if each.outcome else self._doing(each.trial))
            for each in view.trials[-_LAST_TRIALS:]
        ]
        bar = RichTable.grid()  # a bar by itself does not end its line
        total, done = run.most_trials, len(view.ended)
        bar.add_row(ProgressBar(total=total, completed=done, width=60))
        status = progress.lines(run, progress.Status.of_run(self._folder), self._trials)
        lines = map(Text, (view.verdict.headline, *status))
        return Group(terminal.rich_table(Table(("trial", "result"), cells)), bar, *lines)

    def _doing(self, trial: Trial) -> str:
        return progress.doing(self._trials / trial.name)
