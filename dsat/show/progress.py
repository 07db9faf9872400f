"""Progress of a run: trials, steps and the time left."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from dsat.in_trial.rank_files import ACTIVITY_FILE, read_steps
from dsat.run import finals
from dsat.run.run import Run
from dsat.run.trial_factory import count_finals
from dsat.values import format as fmt
from dsat.values.trial import TrialKind

_LEAST_TRIALS = 3  # before the time left is estimated
_RECENT = 20


def describe_progress(run: Run) -> list[str]:
    """Return lines on an unfinished run: number of trials, and the time left if known."""
    found = [f"{len(run.outcomes)} of at most {run.plan.max_trials} trials"]
    left = time_left(run)
    return found if left is None else [*found, left]


def describe_activity(trial_folder: Path) -> str:
    """Return what a running trial is doing; a trial without a folder still waits for devices."""
    if not trial_folder.exists():
        return "waits for devices"
    steps = read_steps(trial_folder)
    if steps is not None:
        return f"step {steps}"
    try:
        path = trial_folder / ACTIVITY_FILE
        text, since_s = path.read_text(), time.time() - path.stat().st_mtime
    except OSError:
        return "starts"
    return f"{text} ({fmt.duration(max(0.0, since_s))})" if text else "starts"


def time_left(run: Run) -> str | None:
    """Estimate the time of all remaining trials; None if too few have ended or none remain.

    The range comes from the lower and upper quartiles of the durations of recent trials. Search
    trials are assumed to run at the highest concurrency among these; finals run alone.
    """
    recent = [i for i in run.outcomes if run.trials[i].kind is not TrialKind.PROFILE][-_RECENT:]
    took = [run.outcomes[trial_id].duration_s for trial_id in recent]
    if len(took) < _LEAST_TRIALS:
        return None
    most = run.plan.max_trials
    left = most - len(run.outcomes)
    if left <= 0:
        return None
    alone = left
    if run.finals is None:
        alone = min(left, finals.reserved(most - count_finals(run), run.plan.finals))
    at_once = 1 + max(run.neighbours.get(trial_id, 0) for trial_id in recent)
    rounds = alone + -(-(left - alone) // at_once)
    quartiles = statistics.quantiles(took, n=4, method="inclusive")
    low, high = (fmt.duration(rounds * seconds) for seconds in (quartiles[0], quartiles[-1]))
    span = low if low == high else f"{low} to {high}"
    return f"at most {fmt.count(left, 'more trial')} ({span})"
