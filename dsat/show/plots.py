"""The report's plots as Vega-Lite 6 specifications, one function each.

Colours are Okabe and Ito's (safe for the colour-blind), and points of strategies differ in shape
too. All text of a run reaches a plot as data, never as part of an expression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsat.show import step_parts
from dsat.show.view import RunView, TrialView
from dsat.values import format as fmt
from dsat.values.objective import METRICS
from dsat.values.trial import TrialKind

Rows = Sequence[Mapping[str, Any]]
Spec = dict[str, Any]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
_BEST = "#e00000"
_MOST_BARS = 24
_FORMATS = {"ms": ".3~r", "value": ".4~s"}


def make_plots(view: RunView) -> list[Spec]:
    """Return title, alternative text and specification of each plot with data."""
    return [plot for plot in (_throughput(view), _step_times(view)) if plot is not None]


def _throughput(view: RunView) -> Spec | None:
    """Plot the metric over the micro batch by strategy; mark trials that ran out of memory."""
    metric = view.plan.metric
    compared = [v for v in view.trials if v.trial.kind is not TrialKind.PROFILE]
    rows = [_row(v, metric) for v in compared]
    if not rows:
        return None
    ran = [row for row in rows if row["value"] is not None]
    lost = [row for row in rows if row["out_of_memory"]]
    upper: dict[Any, Spec] = {}
    for trial_view in view.ranked:  # the best of each strategy and micro batch
        row = _row(trial_view, metric)
        upper.setdefault((row["strategy"], row["micro_batch"]), row)
    sizes = sorted({row["micro_batch"] for row in rows})
    powers = [2**n for n in range(30) if sizes[0] <= 2**n <= sizes[-1]]
    x = _number(
        "micro_batch",
        "micro batch (samples per device)",
        scale={"type": "log", "base": 2},
        axis={"values": powers if len(powers) > 1 else sizes},
    )
    axis = {"format": "~s"}  # 15G, not 15,000,000,000
    y = _number("value", f"{metric} ({METRICS[metric].unit})", axis=axis)
    interval = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    names = sorted({str(row["strategy"]) for row in (*ran, *lost)})
    look = _colours_of_strategies(names)
    colour = {"color": look["color"]}
    tips = {"tooltip": _tips("name", "shown", "changes")}
    best = {"condition": {"test": "datum.best", "value": _BEST}, "value": None}
    cross = {"type": "text", "text": "✕", "size": 14, "baseline": "middle"}
    interval_text = " with its 95 % interval" if METRICS[metric].has_interval else ""
    bottom = {"value": {"expr": "height - 8"}}
    return _plot(
        f"{metric} over the micro batch",
        f"One point for each trial{interval_text}, a line through the best of each strategy; ✕ "
        "marks trials that ran out of memory.",
        320,
        _layer(list(upper.values()), {"type": "line", "opacity": 0.5}, {"x": x, "y": y, **colour}),
        _layer(ran, "rule", interval),
        _layer(
            ran,
            {"type": "point", "filled": True, "size": 70},
            {"x": x, "y": y, **look, "stroke": best, "strokeWidth": {"value": 3}, **tips},
            name="ran",
        ),
        _layer(lost, cross, {"x": x, "y": bottom, **colour, **tips}, name="oom"),
    )


def _step_times(view: RunView) -> Spec | None:
    """Plot the parts of an optimizer step per sample, to compare different batch sizes."""
    rows = []
    for trial_view in view.ranked[:_MOST_BARS]:
        metrics = trial_view.outcome and trial_view.outcome.metrics
        if metrics:
            times = step_parts.milliseconds(metrics)
            name, size = trial_view.trial.name, trial_view.trial.batch.train_batch_size
            rows += [
                {"name": name, "part": part, "ms": time / size, "order": order}
                for order, (part, time) in enumerate(zip(step_parts.PARTS, times, strict=True))
            ]
    encoding = {
        "y": {"field": "name", "type": "nominal", "sort": None, "title": "trial"},
        "x": _number("ms", "ms per sample", stack=True),
        "color": _nominal("part", step_parts.PARTS),
        "order": _number("order"),
        "tooltip": _tips("name", "part", "ms"),
    }
    title = "where the time of a step goes"
    text = "Milliseconds per sample of the fastest trials, the best first."
    return _plot(title, text, {"step": 16}, _layer(rows, "bar", encoding)) if rows else None


def _row(view: TrialView, metric: str) -> dict[str, Any]:
    outcome, batch = view.outcome, view.trial.batch
    measured = outcome.metrics if outcome else None
    ci95 = measured.ci95 if measured and METRICS[metric].has_interval else 0.0
    return {
        "name": view.trial.name,
        "strategy": fmt.strategy(view.trial.strategy),
        "micro_batch": batch.micro_batch,
        "value": view.value,
        "low": view.value and view.value * (1 - ci95),
        "high": view.value and view.value * (1 + ci95),
        "best": view.is_best,
        "out_of_memory": outcome is not None and outcome.kind.is_out_of_memory,
        "shown": view.result,
        "changes": view.changes,
    }


def _plot(title: str, text: str, height: int | Spec, *layers: Spec) -> Spec:
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "layer": layers,
    }
    title = f"{title[0].upper()}{title[1:]}"
    return {"title": title, "text": text, "spec": spec}


def _layer(rows: Rows, mark: str | Spec, encoding: Spec, name: str | None = None) -> Spec:
    layer: Spec = {"data": {"values": list(rows)}, "mark": mark, "encoding": encoding}
    return layer if name is None else {"name": name, **layer}


def _number(field: str, title: str | None = None, **more: Any) -> Spec:
    encoding = {"field": field, "type": "quantitative", **more}
    return encoding if title is None else {**encoding, "title": title}


def _nominal(field: str, domain: Sequence[str]) -> Spec:
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(domain))]
    scale = {"domain": list(domain), "range": colours}
    legend = {"orient": "top", "symbolOpacity": 1}
    return {"field": field, "type": "nominal", "scale": scale, "legend": legend}


def _colours_of_strategies(domain: Sequence[str]) -> Spec:
    """Return colours and shapes of the strategies, under one legend."""
    colour = _nominal("strategy", domain)
    shapes = [_SHAPES[number % len(_SHAPES)] for number in range(len(domain))]
    return {
        "color": colour,
        "shape": {**colour, "scale": {"domain": list(domain), "range": shapes}},
    }


def _tips(*fields: str) -> list[Spec]:
    """Return the fields of a tooltip, with formats for their numbers."""
    return [
        {"field": field, "format": _FORMATS[field]} if field in _FORMATS else {"field": field}
        for field in fields
    ]
