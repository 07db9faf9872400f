"""`report.html`: the results of a run in one file that works offline; and `dsat watch`'s page.

Plots need vl-convert (`pip install vl-convert-python`), which bundles Vega as one script; without
it the page has only texts and tables.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dsat.engines.trial_folder import TRIALS_FOLDER
from dsat.show import plots
from dsat.show.differences import differences
from dsat.show.view import RunView
from dsat.values import format as fmt
from dsat.values.files import cache_folder, write_atomically, write_cache
from dsat.values.text import hide_secrets_in_values

PAGE_FILE = "report.html"
_VEGA_LITE = "6.1"


def write_page(view: RunView, folder: Path, train_line: str) -> None:
    """Write the page into a run's folder; for `train_line`, see `summary.write_files`."""
    text = _render("page.html", watch="", **_parts(view, TRIALS_FOLDER, train_line))
    write_atomically(folder / PAGE_FILE, text)


def watch_html(view: RunView, folder: str) -> str:
    """Return the page of `dsat watch`; its script fetches what `watch_parts` returns."""
    script = _template("watch.js")
    return _render("page.html", view=view, folder=folder, watch=script, plots=[])


def watch_parts(view: RunView, train_line: str) -> dict[str, Any]:
    """Return the parts of a report: `html` of its body, and `specs` of its plots."""
    if not view.trials:
        return {"html": "<p>No trial has begun.</p>", "specs": []}
    values = _parts(view, "", train_line)
    specs = [plot["spec"] for plot in values["plots"]]
    return {"html": _render("body.html", **values), "specs": specs}


def _render(which: str, /, **values: Any) -> str:
    """Render a template with values, style, script and Vega."""
    common = {"css": _template("page.css"), "script": _template("page.js"), "vega": _vega()}
    text: str = _environment().get_template(which).render({**common, **values})
    return text


@cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["address"] = lambda path: quote(os.fsencode(path))
    environment.filters["strategy"] = fmt.strategy
    return environment


def _parts(view: RunView, folders: str, train_line: str) -> dict[str, Any]:
    """Return the values of the page's templates.

    `folders` is the path of the trials' folders, relative to the page; if empty, no links are made.
    """
    best = view.best and view.best.trial
    return {
        "view": view,
        "ranks": {each.trial.id: rank for rank, each in enumerate(view.ranked)},
        "info": {key: str(value) for key, value in view.info.items()},
        "folders": folders,
        "train_line": train_line if view.best is not None else "",
        "config": hide_secrets_in_values(view.best_config),
        "changes": differences(view.plan, best, view.own_switches) if best else [],
        "plots": plots.make_plots(view),
    }


@cache
def _vega() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script; empty without vl-convert."""
    try:
        import vl_convert
    except (ImportError, NameError):  # NameError after Ctrl-C interrupted an import
        return ""
    # Bundling takes some seconds, more than a short trial, so its result is cached.
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
def _template(name: str) -> str:
    return (resources.files("dsat.show") / "templates" / name).read_text(encoding="utf-8")
