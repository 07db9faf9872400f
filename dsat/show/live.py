"""Live view of a search: log lines, and below them a table of its latest trials."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable

from dsat.run.loop import Observer
from dsat.run.run import Run
from dsat.show import progress, terminal
from dsat.show.view import RunView
from dsat.values.table import Table

_LAST_TRIALS = 12


class LiveView(Observer):
    """Printer of log lines and, on a terminal, of a table with the latest trials.

    It uses standard error, because standard output is for results.
    """

    def __init__(self) -> None:
        self._console, is_terminal = terminal.console(sys.stderr), sys.stderr.isatty()
        self._live = Live(console=self._console, auto_refresh=False) if is_terminal else None
        self._trials = Path()
        self._view: RunView | None = None
        self._built_at: tuple[int, int] | None = None
        self._last_shown: object = None

    def follow(self, trials: Path) -> None:
        self._trials = trials

    @property
    def is_live(self) -> bool:
        return self._live is not None

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, *lines: str) -> None:
        """Print lines above the table, unwrapped so that they can be copied."""
        for line in lines:
            self._console.print(terminal.as_text(line), soft_wrap=True)

    def show(self, heading: str, table: Table) -> None:
        """On a terminal, show a table that is still growing; it disappears at the end."""
        if self._live is not None:
            self._live.transient = True
            rich = terminal.rich_table(table, self._console.width)
            self._live.update(Group(terminal.as_text(heading), rich), refresh=True)

    def waited(self, run: Run) -> None:
        if self._live is None or not run.has_begun:
            return
        state = len(run.trials), len(run.outcomes)  # the view changes only with these
        if self._view is None or state != self._built_at:
            self._view, self._built_at = RunView(run), state
        view = self._view
        cells = []
        for trial_view in view.trials[-_LAST_TRIALS:]:
            folder = self._trials / trial_view.trial.name
            result = trial_view.result if trial_view.outcome else progress.describe_activity(folder)
            cells.append((trial_view.label, result))
        lines = (view.verdict.headline, *progress.describe_progress(run))
        if (cells, lines) == self._last_shown:
            return
        self._last_shown = cells, lines
        bar = RichTable.grid()  # a bar outside a table does not end its line
        bar.add_row(ProgressBar(total=run.plan.max_trials, completed=len(view.ended), width=60))
        footer: list[RenderableType] = [bar, *map(terminal.as_text, lines)]
        self._live.update(self._fit(cells, footer), refresh=True)

    def _fit(self, cells: Sequence[tuple[str, str]], footer: Sequence[RenderableType]) -> Group:
        """Return the table of the latest trials that the terminal's height allows."""
        table = Table(("trial", "result"), cells, names=("trial",))
        group = Group(terminal.rich_table(table, self._console.width), *footer)
        if len(cells) > 1 and len(self._console.render_lines(group)) >= self._console.height:
            return self._fit(cells[1:], footer)
        return group
