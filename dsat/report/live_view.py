"""The progress of a run: a table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dsat.memory.forecast import Forecast
from dsat.report import format as fmt
from dsat.report import summary
from dsat.report.log_lines import Narrator
from dsat.report.verdict import verdict
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial

_LAST_TRIALS = 12
_PLAIN_WIDTH = 140


class LiveView:
    """Shows a run while it goes on; an `Observer` of the loop.

    Args:
        stream: where to; a table only if it is a terminal.
    """

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        width = None if stream.isatty() else _PLAIN_WIDTH
        self._console = Console(
            file=stream, highlight=False, soft_wrap=width is not None, width=width
        )
        self._live = Live(console=self._console, auto_refresh=False) if stream.isatty() else None
        self._narrator = Narrator()

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
        if self._live is None:
            self.say(*self._narrator.started(trial))
        self.waited(run)

    def ended(self, run: Run, trial: Trial, outcome: Outcome) -> None:
        self.say(*self._narrator.ended(run, trial, outcome, result=self._live is None))
        self.waited(run)

    def began(self, run: Run, forecast: Forecast | None) -> None:
        self.say(*self._narrator.search_began(run, forecast))

    def waited(self, run: Run) -> None:
        if self._live is not None and run.plan is not None:
            self._live.update(_view(run), refresh=True)

    def show_result(self, run: Run) -> None:
        """The final table and what it means."""
        if run.plan is None or not run.outcomes:
            return
        table = Table(*summary.HEADINGS, title=f"{run.plan.method}: {run.plan.metric}")
        for row in summary.stage_cells(run):
            table.add_row(*row)
        self._console.print(table)
        self.say(*summary.facts(run), *verdict(run))


def _view(run: Run) -> Group:
    assert run.plan is not None
    table = Table("trial", "result", "took", expand=False)
    for trial in list(run.trials.values())[-_LAST_TRIALS:]:
        outcome = run.outcomes.get(trial.id)
        style = "bold" if trial is run.best else ""
        if outcome is None:
            table.add_row(trial.name, "running", "")
        else:
            took = fmt.duration(outcome.duration_s)
            line = fmt.outcome(outcome, run.plan.metric)
            table.add_row(trial.name, line, took, style=style)
    done, total = len(run.outcomes), run.plan.max_trials
    best = "none yet"
    if run.best is not None:
        best = f"{run.best.name}, {fmt.metric(run.plan.metric, run.best_value)}"
    head = Text(f"{done} of at most {total} trials; best: {best}")
    return Group(table, ProgressBar(total=total, completed=done, width=60), head)
