"""What the search runner leaves behind when it ends: in its log, its description, its metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dsat.determined_cluster import result
from dsat.report import format as fmt
from dsat.report import summary
from dsat.report.verdict import gain, say_gain, verdict
from dsat.tuning.run import Run
from dsat.values.text import printable, values_without_secrets

FAILED_METRIC = "search_failed"  # 1 or 0, beside the best value, in what the web UI summarises
_LONGEST_DESCRIPTION = 250


def has_failed(run: Run, *, over: bool) -> bool:
    """Whether a search came to its end without a configuration that runs."""
    return over and run.best is None


def lines(run: Run) -> list[str]:
    """What it found, for people; of a search that found nothing, why, with the script's words."""
    told = verdict(run)
    if run.best is None:
        details = [outcome.detail for outcome in run.outcomes.values() if outcome.detail]
        told = [*(details[-1].splitlines() if details else []), *told]
    best = summary.best_config(run)
    if best is not None:
        told.append(f"best_ds_config.json: {json.dumps(values_without_secrets(best))}")
    return told


def result_lines(run: Run, experiments: Mapping[str, int], *, over: bool) -> list[str]:
    """The same for programs.

    Args:
        experiments: numbers by what they are.
    """
    return result.to_lines({**result.of_run(run, over=over), **experiments})


def description(own: str, run: Run, *, over: bool, canceled: bool = False) -> str:
    """The runner's description once it has ended, of which its state says too little.

    Args:
        own: the user's own.
    """
    parts = [own, _ended(run, over, canceled)]
    return printable(" - ".join(filter(None, parts)))[:_LONGEST_DESCRIPTION]


def _ended(run: Run, over: bool, canceled: bool) -> str:
    if has_failed(run, over=over):
        return f"FAILED: {run.stop_reason}"
    found, outcome = "nothing was measured", run.best_outcome
    if run.best is not None and outcome is not None and run.plan is not None:
        found = f"best {run.best.name}, {fmt.outcome(outcome, run.plan.metric)}"
        confirmed = gain(run)
        if confirmed is not None and run.best is not run.baseline:
            found += f", {say_gain(confirmed)} your own"
    if canceled:
        return f"canceled; {found}"
    return found if over else f"ended from outside; {found}"


def metrics(run: Run, *, over: bool) -> dict[str, Any]:
    """What the runner's trial reports at its end."""
    assert run.plan is not None
    found: dict[str, Any] = {FAILED_METRIC: int(has_failed(run, over=over))}
    if run.best_value is not None:
        found[run.plan.metric] = run.best_value
    return found
