"""The pages of `dsat watch`: the report's, whose parts are fetched again when a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.report import format as fmt
from dsat.report import page, page_rows, plots, progress
from dsat.report.run_view import RunView
from dsat.tuning.run import Run


@dataclass(frozen=True)
class Watched:
    """A run as it is watched.

    Attributes:
        folder: of the run.
        state: `goes on`, `interrupted` or `over`.
        trials: where its trials have their folders.
    """

    folder: Path
    run: Run
    state: str
    trials: Path

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.folder.name

    @property
    def goes_on(self) -> bool:
        return self.state == "goes on"


def shell(watched: Watched) -> str:
    """The page around a run, which fetches all that changes."""
    plan = watched.run.plan
    assert plan is not None
    return page.render(
        "watch.html",
        name=str(watched.run.info.get("name", "dsat")),
        method=plan.method,
        folder=str(watched.folder),
        max_trials=plan.max_trials,
        watch=page.template("watch.js"),
    )


def state(watched: Watched, query: str) -> dict[str, Any]:
    """The parts of the page: `html`, and `specs` of the plots in it.

    Args:
        watched: what to show.
        query: ends the addresses of files.
    """
    if not watched.run.trials:
        return {"html": "<p>No trial has begun.</p>", "specs": []}
    parts = page.parts(watched.run, "trials", "", query=query)
    specs = [plot["spec"] for plot in parts["plots"]]
    return {"html": page.render("body.html", **parts), "specs": specs}


def now(watched: Watched, version: int) -> dict[str, Any]:
    """Return the status that is sent every second.

    Args:
        watched: the run.
        version: of what `state` returns.
    """
    run = watched.run
    assert run.plan is not None
    lines = [f"{len(run.outcomes)} of at most {run.plan.max_trials} trials"]
    lines.append(f"the run {_IS[watched.state]}")
    running = run.running if watched.goes_on else []
    if watched.goes_on:
        status = progress.Status.of_run(watched.folder)
        if status is not None:
            lines.append(progress.slots_line(run, status.num_slots, watched.trials))
            if status.outlook is not None:
                lines.append(progress.outlook_line(run, status.outlook))
        left = progress.time_left(run, 1 if status is None else status.at_once)
        lines += [] if left is None else [str(left)]
    return {
        "version": version,
        "goes_on": watched.goes_on,
        "status": "; ".join(lines),
        "running": [
            {"id": t.id, "name": t.name, "doing": progress.doing(watched.trials / t.name)}
            for t in running
        ],
    }


_IS = {
    "goes on": "goes on",
    "interrupted": "was interrupted",
    "over": "is over",
    "failed": "failed",
}


def runs(found: Sequence[Watched], unread: Sequence[str], folder: Path, query: str) -> str:
    """The page that compares runs.

    Args:
        found: the runs.
        unread: why others cannot be read.
        folder: whose runs they are.
        query: ends addresses.
    """
    rows = []
    for watched in found:
        plan, view = watched.run.plan, RunView.of(watched.run)
        assert plan is not None
        rows.append(
            {
                "name": watched.name,
                "state": watched.state,
                "method": plan.method,
                "metric": plan.metric,
                "trials": len(watched.run.outcomes),
                "best": fmt.metric(plan.metric, watched.run.best_value),
                "gain": view.gain_text,
                "ratio": view.gain,
            }
        )
    return page.render(
        "runs.html",
        folder=str(folder),
        runs=rows,
        notes=list(unread),
        query=query,
        plots=_comparisons(found),
    )


def _comparisons(found: Sequence[Watched]) -> list[dict[str, Any]]:
    """Best so far of all runs with the same metric, over trials and over minutes."""
    by_metric: dict[str, list[dict[str, Any]]] = {}
    for watched in found:
        plan = watched.run.plan
        assert plan is not None
        rows = [{**row, "run": watched.name} for row in page_rows.best_so_far(watched.run)]
        by_metric.setdefault(plan.metric, []).extend(rows)
    return [
        {
            "title": f"best {metric} over {over}",
            "told": f"A line for each run: the best {metric} that was known after so many {over}.",
            "spec": plots.best_of_runs(rows, metric, fmt.unit(metric), over),
        }
        for metric, rows in by_metric.items()
        if rows
        for over in ("trials", "minutes")
    ]
