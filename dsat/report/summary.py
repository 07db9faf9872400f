"""Result files of a run: the best configuration, its metrics and `summary.md`."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from dsat.report import format as fmt
from dsat.report.run_view import STAGE_HEADINGS, TRIAL_HEADINGS, RunView
from dsat.report.verdict import knee, knee_row
from dsat.tuning.run import Run
from dsat.values.files import write_atomically

BEST_CONFIG_FILE = "best_ds_config.json"
BEST_METRICS_FILE = "best_ds_metrics.json"
SUMMARY_FILE = "summary.md"


def best_config(run: Run) -> dict[str, Any] | None:
    """Return the best configuration, as `deepspeed.initialize` takes it."""
    if run.best is None or run.plan is None:
        return None
    return run.plan.config(run.best.overrides)


def write_files(run: Run, folder: Path, train_line: str) -> None:
    """Write the best configuration, its metrics and `summary.md` into the run's folder."""
    config = best_config(run)
    if run.best is not None and config is not None:
        outcome = run.best_outcome
        assert outcome is not None and outcome.metrics is not None
        text = json.dumps(config, indent=2) + "\n"
        write_atomically(folder / BEST_CONFIG_FILE, text)
        text = json.dumps({"trial": run.best.name, **outcome.metrics.to_json()}, indent=2) + "\n"
        write_atomically(folder / BEST_METRICS_FILE, text)
    write_atomically(folder / SUMMARY_FILE, markdown(run, train_line))


def markdown(run: Run, train_line: str) -> str:
    """Return the text of `summary.md`."""
    view = RunView.of(run)
    lines = [f"# {view.name}: {view.method} search", ""]
    lines += [f"- {line}" for line in view.facts]
    lines += ["", *markdown_table(STAGE_HEADINGS, view.stage_cells()), ""]
    lines += [f"{line}\n" for line in view.verdict]
    if view.best is not None:
        lines += [f"Train with it: `{train_line}`", ""]
    lines += _knee_lines(run)
    lines += ["## All trials", ""]
    lines += markdown_table(TRIAL_HEADINGS, [trial.cells() for trial in view.ended])
    if view.warnings:
        lines += ["", "## Warnings", "", *(f"- {warning}" for warning in view.warnings)]
    return "\n".join(lines) + "\n"


def _knee_lines(run: Run) -> list[str]:
    """Return the table of the best value of each micro batch, with its knee."""
    assert run.plan is not None
    rows = knee(run)
    where = knee_row(rows, run.plan.indifference)
    if where is None:
        return []
    cells = [
        (
            str(size),
            fmt.metric(run.plan.metric, value),
            fmt.percent(part) + (" (knee)" if size == where else ""),
        )
        for size, value, part in rows
    ]
    table = markdown_table(("micro batch", run.plan.metric, "of the best"), cells)
    return ["## The best of each micro batch", "", *table, ""]


def markdown_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[str] = ()
) -> list[str]:
    """Return the lines of a table, its columns aligned; those headed by `numbers` to the right.

    As wide as the "pipe" format of the tabulate package makes it.
    """
    table = [[cell.replace("|", "\\|") for cell in row] for row in (headings, *rows)]
    widths = [
        max(len(heading) + 2, *(len(row[i]) for row in table)) for i, heading in enumerate(table[0])
    ]
    right = [heading in numbers for heading in headings]

    def line(cells: Sequence[str]) -> str:
        columns = zip(cells, widths, right, strict=True)
        return "| " + " | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in columns) + " |"

    rules = [
        "-" * (width + 1) + ":" if r else ":" + "-" * (width + 1)
        for width, r in zip(widths, right, strict=True)
    ]
    return [line(table[0]), "|" + "|".join(rules) + "|", *map(line, table[1:])]
