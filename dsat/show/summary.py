"""Result files of a run: the best configuration, its metrics and `summary.md`."""

from __future__ import annotations

import json
from pathlib import Path

from dsat.show.view import RunView
from dsat.values.files import write_atomically

BEST_CONFIG_FILE = "best_ds_config.json"
BEST_METRICS_FILE = "best_ds_metrics.json"
SUMMARY_FILE = "summary.md"
STATUS_FILE = "status.json"  # the command that trains with the best configuration


def write_files(view: RunView, folder: Path, train_line: str) -> None:
    """Write the best configuration, its metrics and `summary.md` into the run's folder.

    `train_line` is a command that trains with the best configuration; empty if unknown.
    """
    outcome = view.best_outcome
    if view.best is not None:
        assert outcome is not None and outcome.metrics is not None
        metrics = {"trial": view.best.trial.name, **outcome.metrics.to_json()}
        for name, value in ((BEST_CONFIG_FILE, view.best_config), (BEST_METRICS_FILE, metrics)):
            write_atomically(folder / name, json.dumps(value, indent=2) + "\n")
        if train_line:
            status = json.dumps({"train_line": train_line})
            write_atomically(folder / STATUS_FILE, status)
    write_atomically(folder / SUMMARY_FILE, markdown(view, train_line))


def read_train_line(folder: Path) -> str:
    """Return the command that trains with the best configuration; empty if it is not known."""
    try:
        return str(json.loads((folder / STATUS_FILE).read_text(encoding="utf-8"))["train_line"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def markdown(view: RunView, train_line: str) -> str:
    """Return the text of `summary.md`."""
    lines = [f"# {view.title}", "", *(f"{line}\n" for line in view.verdict.lines)]
    if view.best is not None:
        source = f"it: `{train_line}`" if train_line else f"`{BEST_CONFIG_FILE}`."
        lines += [f"Train with {source}", ""]
    lines += [*(f"- {line}" for line in view.facts), ""]
    lines += [*view.stage_table().markdown(), "", "## All trials", ""]
    lines += view.trial_table().markdown()
    if view.warnings:
        lines += ["", "## Warnings", "", *(f"- {warning}" for warning in view.warnings)]
    return "\n".join(lines) + "\n"
