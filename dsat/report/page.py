"""`report.html`: the results of a run in one file that opens anywhere without a network.

Plots need vl-convert (`pip install 'dsat[report]'`), which holds Vega as one script; without it the
page has the same texts and tables.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dsat.report import format as fmt
from dsat.report import memory_parts, page_rows, plots
from dsat.report.run_view import STAGE_HEADINGS, RunView
from dsat.report.speed_model import Predicted, SpeedModel
from dsat.search.threads import in_one_thread
from dsat.tuning.run import Run
from dsat.values.files import cache_folder, write_atomically, write_cache
from dsat.values.text import values_without_secrets
from dsat.values.trial import Trial, TrialKind

PAGE_FILE = "report.html"
_MOST_BARS = 24
_VEGA_LITE = "6.1"


def write_page(run: Run, folder: Path, trials: Path, train_line: str) -> None:
    """Write the page into a run's folder.

    Args:
        run: what to show.
        folder: of the run.
        trials: where trials have their folders.
        train_line: the command that trains with the best configuration.
    """
    path = folder / PAGE_FILE
    write_atomically(path, html(run, page_rows.folders_of(trials, path), train_line))


def html(run: Run, folders: str, train_line: str) -> str:
    """Return the page's text.

    Args:
        run: what to show.
        folders: where trials have their folders, relative to the page.
        train_line: the command that trains with the best configuration.
    """
    return render("page.html", **parts(run, folders, train_line))


def render(which: str, /, **values: Any) -> str:
    """Render a template with its values, the style and Vega."""
    common = {"css": template("page.css"), "script": template("page.js"), "vega": _vega()}
    text: str = _compiled(which).render({**common, **values})
    return text


@cache
def _compiled(which: str) -> Any:
    """A template, compiled once: pages are written anew again and again."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["address"] = _address
    return environment.get_template(which)


def _address(path: str) -> str:
    """Return a path as a link; its names may be any bytes."""
    try:
        return quote(os.fsencode(path))
    except UnicodeEncodeError:  # no file system has this one
        return quote(path, errors="surrogatepass")


@in_one_thread
def parts(run: Run, folders: str, train_line: str, *, query: str = "") -> dict[str, Any]:
    """Return the values of the page's templates.

    Args:
        run, folders, train_line: as for `html`.
        query: ends the addresses of trials' files.
    """
    assert run.plan is not None
    rows = page_rows.trial_rows(run, folders)
    _rank(rows, smaller_is_better=run.plan.objective.smaller_is_better)
    model, view = SpeedModel.of_run(run), RunView.of(run)
    return {
        "name": view.name,
        "method": view.method,
        "is_over": run.stop_reason is not None,
        "headline": view.headline,
        "verdict": view.verdict,
        "facts": view.facts,
        "info": {key: str(value) for key, value in run.info.items()},
        "train_line": train_line if run.best is not None else "",
        "config": values_without_secrets(view.best_config),
        "changes": page_rows.changes(run, functools.partial(_by_model, model, run)),
        "gains": view.gains,
        "headings": STAGE_HEADINGS,
        "stages": view.stage_cells(),
        "trials": rows,
        "notes": list(view.warnings),
        "plots": _plots(run, rows, model),
        "query": query,
    }


def _plots(run: Run, rows: list[dict[str, Any]], model: SpeedModel | None) -> list[dict[str, Any]]:
    """Title, text for those who cannot see it, and specification of each plot with data."""
    assert run.plan is not None
    metric, unit = run.plan.metric, fmt.unit(run.plan.metric)
    profile = run.profile
    limit = None if profile is None else profile.slot_memory_bytes / 2**30
    ran = sorted((row for row in rows if "rank" in row), key=lambda row: row["rank"])
    best = page_rows.best_so_far(run)
    memory = [row for row in ran if row.get("used_gib") and row.get("predicted_gib")]
    settings = page_rows.importances(run)[:_MOST_BARS]
    found = []

    def add(has_data: bool, title: str, told: str, spec: dict[str, Any]) -> None:
        if has_data:
            found.append({"title": title, "told": told, "spec": spec})

    finals = page_rows.final_rows(run)
    add(
        bool(finals),
        "the finals",
        "Runs in turns, yours and the best; a line joins the two of a pair.",
        plots.finals(finals, metric, unit),
    )
    add(
        any(row["kind"] != TrialKind.PROFILE.value for row in rows),
        f"{metric} over the micro batch",
        "One point for each trial with its 95 % interval, a line through the best of each "
        "strategy; ✕ marks trials that ran out of memory. The band is the 95 % interval of what "
        "the model of speed makes of all of them.",
        plots.throughput(rows, metric, unit, [] if model is None else model.band()),
    )
    for over in ("trials", "minutes"):
        add(
            bool(best),
            f"best so far over {over}",
            f"The best {metric} that was known after so many {over}.",
            plots.best_so_far(best, metric, unit, over),
        )
    add(
        bool(memory),
        "memory: predicted and used",
        "The peak of a slot; the dashed line is what a slot has.",
        plots.memory(memory[:_MOST_BARS], limit),
    )
    if run.best is not None:
        parts = memory_parts.rows(run, run.best)
        add(
            bool(parts),
            "what fills the memory of a slot",
            "The best trial in each phase of a step: the parts as ZeRO's formula has them, the "
            "rest is what was measured beyond; the mark is what was measured.",
            plots.memory_by_part(
                parts, memory_parts.PARTS, memory_parts.measured(run, run.best), limit
            ),
        )
    add(
        bool(ran),
        "where the time of a step goes",
        "Milliseconds per sample of the fastest trials, the best first.",
        plots.step_times(ran[:_MOST_BARS]),
    )
    add(
        bool(settings),
        "what each setting changed",
        "By pairs of trials that differ in one setting alone; few pairs say little.",
        plots.importances(settings),
    )
    return found


def _by_model(
    model: SpeedModel | None, run: Run, best: Trial, key: str, own: Any
) -> Predicted | None:
    return None if model is None else model.gain(run, best, key, own)


def _rank(rows: Sequence[dict[str, Any]], *, smaller_is_better: bool) -> None:
    """Give each trial that ran its rank, 0 for the best."""
    ran = [row for row in rows if row.get("value") is not None]
    ran.sort(key=lambda row: row["value"], reverse=not smaller_is_better)
    for place, row in enumerate(ran):
        row["rank"] = place


@cache
def _vega() -> str:
    """Vega, Vega-Lite and vega-embed as one script; empty without vl-convert."""
    try:
        import vl_convert
    except (ImportError, NameError):  # the latter after an import that Ctrl-C has ended half way
        return ""
    # To bundle it takes some seconds, more than a short trial.
    version = metadata.version("vl-convert-python")
    kept = cache_folder("report") / f"vega-{version}-{_VEGA_LITE}.js"
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    snippet = "window.vegaEmbed = vegaEmbed;"
    bundle: str = vl_convert.javascript_bundle(snippet, vl_version=_VEGA_LITE)
    script = bundle.replace("</script", "<\\/script")
    write_cache(kept, script)
    return script


@cache
def template(name: str) -> str:
    """The text of a template."""
    return (resources.files("dsat.report") / "templates" / name).read_text(encoding="utf-8")
