"""Pages of `dsat watch`: the report, whose parts are fetched again while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.report import format as fmt
from dsat.report import page, plots, progress
from dsat.report.run_view import RunView
from dsat.run.run import Run

_IS = {
    "goes on": "goes on",
    "interrupted": "was interrupted",
    "over": "is over",
    "failed": "failed",
}


@dataclass(frozen=True)
class Watched:
    """Run on a page that follows it.

    Attributes:
        folder: of the run.
        state: `goes on`, `interrupted`, `over` or `failed`.
        trials: where its trials have their folders.
    """

    folder: Path
    run: Run
    state: str
    trials: Path

    @property
    def goes_on(self) -> bool:
        return self.state == "goes on"


def shell(watched: Watched) -> str:
    """Return the page around a run, which fetches all that changes."""
    view, script = RunView.of(watched.run), page.template("watch.js")
    return page.render("watch.html", view=view, folder=str(watched.folder), watch=script)


def state(watched: Watched, query: str) -> dict[str, Any]:
    """Return the parts of the page: `html`, and `specs` of the plots in it."""
    if not watched.run.trials:
        return {"html": "<p>No trial has begun.</p>", "specs": []}
    status = progress.Status.of_run(watched.folder)
    line = "" if status is None else status.train_line
    parts = page.parts(watched.run, "trials", line, query=query)
    specs = [plot["spec"] for plot in parts["plots"]]
    return {"html": page.render("body.html", **parts), "specs": specs}


def now(watched: Watched, version: str) -> dict[str, Any]:
    """Return the status that is sent every second.

    Args:
        watched: the run.
        version: of what `state` returns.
    """
    run, trials = watched.run, watched.trials
    status = progress.Status.of_run(watched.folder)
    first, *others = progress.lines(run, status, trials)
    lines = [first, f"the run {_IS[watched.state]}", *(others if watched.goes_on else ())]
    return {
        "version": version,
        "goes_on": watched.goes_on,
        "status": "; ".join(lines),
        "running": [
            {"id": trial.id, "name": trial.name, "doing": progress.doing(trials / trial.name)}
            for trial in (run.running if watched.goes_on else ())
        ],
    }


def runs(found: Sequence[Watched], unread: Sequence[str], folder: Path, query: str) -> str:
    """Return the page that compares runs."""
    rows, by_metric = [], dict[str, dict[str, RunView]]()
    for watched in found:
        name, view = watched.folder.name, RunView.of(watched.run)
        rows.append(
            {
                "name": name,
                "state": watched.state,
                "method": view.plan.method,
                "metric": view.plan.metric,
                "trials": len(view.ended),
                "best": fmt.metric(view.plan.metric, view.best_value),
                "gain": view.gain,
            }
        )
        by_metric.setdefault(view.plan.metric, {})[name] = view
    return page.render(
        "runs.html",
        folder=str(folder),
        runs=rows,
        notes=list(unread),
        query=query,
        plots=[plot for views in by_metric.values() for plot in plots.best_so_far(views)],
    )
