"""The files that people look for after `deepspeed --autotuning`, under the names they have there.

Laid out as deepspeed/autotuning/{autotuner,scheduler}.py (0.19.8) write them. The folder of each
experiment, with its log and its metrics, is the trial engine's.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsat.errors import UserInputError
from dsat.report.summary import best_config, markdown_table
from dsat.tuning.run import Run
from dsat.values.files import PRIVATE_FOLDER, write_atomically
from dsat.values.trial import Trial, TrialKind

OPTIMAL_CONFIG_FILE = "ds_config_optimal.json"
OPTIMAL_COMMAND_FILE = "cmd_optimal.txt"
SUMMARY_FILE = "summary.txt"

_HEADINGS = ("tuning_space", "num_experiments", "best_metric_val", "best_exp_name")
_GLOBAL = "global"


def write_files(run: Run, results_dir: Path, exps_dir: Path, command: str) -> None:
    """Writes what was found into `results_dir`, and each experiment's description into `exps_dir`.

    Where nothing ran there is no optimal configuration and no command.

    Args:
        run: what to write of.
        results_dir, exps_dir: made if they are missing; other files in them are left alone.
        command: for a shell, trains with the optimal configuration, whose path is
            `results_dir / OPTIMAL_CONFIG_FILE`.

    Raises:
        UserInputError: a folder cannot be made or written into.
    """
    files = {results_dir / SUMMARY_FILE: summary_text(run)}
    config = best_config(run)
    if config is not None:
        files[results_dir / OPTIMAL_CONFIG_FILE] = json.dumps(config, indent=2) + "\n"
        files[results_dir / OPTIMAL_COMMAND_FILE] = command + "\n"
    for trial in run.trials.values():
        description = json.dumps(experiment(run, trial), indent=2) + "\n"
        files[exps_dir / f"{trial.name}.json"] = description
    for folder in (results_dir, exps_dir):
        try:
            folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from None
    for path, text in files.items():
        try:
            write_atomically(path, text)
        except OSError as error:
            raise _unwritable(path, error) from None


def summary_text(run: Run) -> str:
    """The table of tuning spaces and what it cost.

    A space is a ZeRO stage with its offloading (`z1`, `z2_offload`); `global` stands for all. The
    profile trial does not count.
    """
    assert run.plan is not None
    tried = [
        trial
        for trial in run.trials.values()
        if trial.kind in (TrialKind.BASELINE, TrialKind.SEARCH) and trial.id in run.outcomes
    ]
    spaces = sorted({trial.strategy for trial in tried})
    rows = []
    for space in spaces:
        trials = [trial for trial in tried if trial.strategy == space]
        rows.append(_row(run, space, len(trials), _best(run, trials)))
    rows.append(_row(run, _GLOBAL, len(tried), run.best))
    table = markdown_table(_HEADINGS, rows, numbers=("num_experiments", "best_metric_val"))
    duration = datetime.timedelta(seconds=run.running_s)
    cost = f"Tuning completed in {duration}. Total number of experiments: {len(tried)}."
    return "\n".join([*table, "", cost]) + "\n"


def experiment(run: Run, trial: Trial) -> dict[str, Any]:
    """The description of one experiment: its whole configuration and where it runs."""
    assert run.plan is not None
    return {
        "name": trial.name,
        "ds_config": run.plan.config(trial.overrides),
        "num_gpus": run.plan.slots_per_trial,
        "num_nodes": 1,
    }


def _best(run: Run, trials: Sequence[Trial]) -> Trial | None:
    assert run.plan is not None
    objective = run.plan.objective
    ran = [(value, trial) for trial in trials if (value := run.value(trial)) is not None]
    return min(ran, key=lambda pair: objective.loss(pair[0]))[1] if ran else None


def _row(run: Run, space: str, trials: int, best: Trial | None) -> tuple[str, ...]:
    value = None if best is None else run.value(best)
    if best is None or value is None:
        return space, str(trials), "-", "-"
    return space, str(trials), f"{value:g}", best.name


def _unwritable(path: Path, error: OSError) -> UserInputError:
    return UserInputError(
        f"cannot be written: {error.strerror}",
        where=str(path),
        hint="Give other folders as autotuning.results_dir and autotuning.exps_dir.",
    )
