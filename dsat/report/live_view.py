"""The terminal: lines, and below them a table of the trials that run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dsat.memory.forecast import Forecast
from dsat.report import format as fmt
from dsat.report import progress
from dsat.report.run_view import STAGE_HEADINGS, RunView
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial

_LAST_TRIALS = 12
_PLAIN_WIDTH = 140


class LiveView:
    """Prints lines, and shows a run in a table while it goes on; an `Observer` of the loop.

    Args:
        stream: where to; a table only if it is a terminal.
    """

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        width = None if stream.isatty() else _PLAIN_WIDTH
        self._console = Console(
            file=stream, highlight=False, soft_wrap=width is not None, width=width
        )
        self._live = Live(console=self._console, auto_refresh=False) if stream.isatty() else None
        self._trials: Path | None = None
        self._folder: Path | None = None

    def follow(self, folder: Path, trials: Path) -> None:
        """Show a run that begins.

        Args:
            folder: of the run.
            trials: where its trials have their folders.
        """
        self._folder, self._trials = folder, trials

    @property
    def shows_trials(self) -> bool:
        """Check for a live table."""
        return self._live is not None

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, *lines: str) -> None:
        """Prints lines above the table."""
        for line in lines:
            self._console.print(Text(line))

    def started(self, run: Run, trial: Trial) -> None:
        self.waited(run)

    def ended(self, run: Run, trial: Trial, outcome: Outcome) -> None:
        self.waited(run)

    def began(self, run: Run, forecast: Forecast | None) -> None:
        self.waited(run)

    def waited(self, run: Run) -> None:
        if self._live is not None and run.plan is not None:
            self._live.update(self._view(run), refresh=True)

    def show_result(self, run: Run) -> None:
        """Print the final table and the verdict."""
        if run.plan is None or not run.outcomes:
            return
        view = RunView.of(run)
        table = Table(*STAGE_HEADINGS, title=f"{view.method}: {view.metric}")
        for row in view.stage_cells():
            table.add_row(*row)
        self._console.print(table)
        self.say(*view.facts, *view.verdict)

    def _view(self, run: Run) -> Group:
        assert run.plan is not None
        table = Table("trial", "result", "took", expand=False)
        for trial in list(run.trials.values())[-_LAST_TRIALS:]:
            outcome = run.outcomes.get(trial.id)
            style = "bold" if trial is run.best else ""
            if outcome is None:
                table.add_row(trial.name, self._running(trial), "")
            else:
                took = fmt.duration(outcome.duration_s)
                line = Text(fmt.printable(fmt.outcome(outcome, run.plan.metric)))
                table.add_row(trial.name, line, took, style=style)
        done, total = len(run.outcomes), run.plan.max_trials
        status = None if self._folder is None else progress.Status.of_run(self._folder)
        head = f"{done} of at most {total} trials"
        if status is not None and self._trials is not None:
            head += f"; {progress.slots_line(run, status.num_slots, self._trials)}"
        lines = [head, progress.best_line(run)]
        if status is not None and status.outlook is not None:
            lines.append(progress.outlook_line(run, status.outlook))
        left = progress.time_left(run, 1 if status is None else status.at_once)
        if left is not None:
            lines.append(str(left))
        bar = Table.grid()  # a bar by itself does not end its line
        bar.add_row(ProgressBar(total=total, completed=done, width=60))
        return Group(table, bar, *map(Text, lines))

    def _running(self, trial: Trial) -> str:
        return "runs" if self._trials is None else progress.doing(self._trials / trial.name)
