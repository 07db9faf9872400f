"""Result files of `deepspeed --autotuning`, with DeepSpeed's names.

Their layout follows deepspeed/autotuning/{autotuner,scheduler}.py (0.19.8). The trial engine
writes the folder of each experiment, with its log and its metrics.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from dsat.errors import UserInputError
from dsat.show.view import RunView, TrialView
from dsat.values.files import PRIVATE_FOLDER, write_atomically
from dsat.values.table import Table

OPTIMAL_CONFIG_FILE = "ds_config_optimal.json"
OPTIMAL_COMMAND_FILE = "cmd_optimal.txt"
SUMMARY_FILE = "summary.txt"

_HEADINGS = ("tuning_space", "num_experiments", "best_metric_val", "best_exp_name")


def write_files(view: RunView, results_dir: Path, exps_dir: Path | None, command: str) -> None:
    """Write the results, and descriptions of the trials if `exps_dir` is given.

    Without a best trial, no configuration and no command are written.

    Args:
        command: shell command that trains with the best configuration; empty if unknown.

    Raises:
        UserInputError: a folder or file cannot be written.
    """
    files = {results_dir / SUMMARY_FILE: summary_text(view)}
    if view.best_config is not None:
        files[results_dir / OPTIMAL_CONFIG_FILE] = json.dumps(view.best_config, indent=2) + "\n"
        if command:
            files[results_dir / OPTIMAL_COMMAND_FILE] = command + "\n"
    folders = [results_dir] if exps_dir is None else [results_dir, exps_dir]
    for each in view.trials if exps_dir is not None else ():
        experiment = {
            "name": each.trial.name,
            "ds_config": view.plan.config(each.trial.overrides),
            "num_gpus": view.plan.slots_per_trial,
            "num_nodes": 1,
        }
        files[folders[-1] / f"{each.trial.name}.json"] = json.dumps(experiment, indent=2) + "\n"
    path = results_dir
    try:
        for path in folders:
            path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        for path, text in files.items():
            write_atomically(path, text)
    except OSError as error:
        raise UserInputError(
            f"cannot be written: {error.strerror}",
            where=str(path),
            hint="Give other folders as autotuning.results_dir and autotuning.exps_dir.",
        ) from None


def summary_text(view: RunView) -> str:
    """Return the table of tuning spaces, with the run's duration and number of trials.

    A space is a ZeRO stage with its offloading (`z1`, `z2_offload`); `global` is all of them. Only
    the user's own configuration and the search's trials count, once they have ended.
    """
    total = sum(stage.trials for stage in view.stages)
    rows = [
        _row(stage.strategy, stage.trials, stage.best, stage.best.value if stage.best else None)
        for stage in view.stages
    ]
    rows.append(_row("global", total, view.best, view.best_value))
    duration = datetime.timedelta(seconds=view.running_s)
    cost = f"Tuning completed in {duration}. Total number of experiments: {total}."
    table = Table(_HEADINGS, rows, numbers=("num_experiments", "best_metric_val"))
    return "\n".join([*table.markdown(), "", cost]) + "\n"


def _row(space: str, trials: int, best: TrialView | None, value: float | None) -> tuple[str, ...]:
    if best is None or value is None:
        return space, str(trials), "-", "-"
    return space, str(trials), f"{value:g}", best.trial.name
