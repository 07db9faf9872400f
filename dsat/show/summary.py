"""Result files of a run: the best configuration, its metrics and `summary.md`."""

from __future__ import annotations

import json
from pathlib import Path

from dsat.show.view import RunView
from dsat.values.files import write_atomically

BEST_CONFIG_FILE = "best_ds_config.json"
BEST_METRICS_FILE = "best_ds_metrics.json"
SUMMARY_FILE = "summary.md"


def write_files(view: RunView, folder: Path, train_line: str | None) -> None:
    """Write the best configuration, its metrics and `summary.md` into the run's folder.

    `train_line` is a command that trains with the best configuration, if known.
    """
    outcome = view.best_outcome
    if view.best is not None:
        assert outcome is not None and outcome.metrics is not None
        metrics = {"trial": view.best.trial.name, **outcome.metrics.to_json()}
        for name, value in ((BEST_CONFIG_FILE, view.best_config), (BEST_METRICS_FILE, metrics)):
            write_atomically(folder / name, json.dumps(value, indent=2) + "\n")
    write_atomically(folder / SUMMARY_FILE, markdown(view, train_line))


def markdown(view: RunView, train_line: str | None) -> str:
    """Return the text of `summary.md`."""
    lines = [f"# {view.title}", "", *(f"{line}\n" for line in view.verdict.lines)]
    if view.best is not None:
        with_it = f"it: `{train_line}`" if train_line else f"`{BEST_CONFIG_FILE}`."
        lines += [f"Train with {with_it}", ""]
    lines += [*(f"- {line}" for line in view.facts), ""]
    lines += [*view.stage_table().markdown(), "", "## All trials", ""]
    lines += view.trial_table().markdown()
    if view.warnings:
        lines += ["", "## Warnings", "", *(f"- {warning}" for warning in view.warnings)]
    return "\n".join(lines) + "\n"
