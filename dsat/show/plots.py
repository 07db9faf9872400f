"""The report's plots as Vega-Lite 6 specifications, one function each.

Colours are Okabe and Ito's (safe for the colour-blind), and shapes repeat what colours say. All
text of a run reaches a plot as data, never as part of an expression.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dsat.run.run import Run
from dsat.show import memory_parts, step_parts
from dsat.show.speed_model import SpeedModel
from dsat.show.view import RunView, TrialView
from dsat.values import format as fmt
from dsat.values.trial import TrialKind

Rows = Sequence[Mapping[str, Any]]
Spec = dict[str, Any]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
_BEST = "#e00000"
_MOST_BARS = 24
_SHOWN_LIMIT = 4.0  # times the largest bar: a limit beyond that is not drawn
_FORMATS = {"gib": ".2f", "ms": ".3~r", "minutes": ".1f"}
_FORMATS |= dict.fromkeys(("value", "best"), ".4~s")
_GIB = 2**30


def make_plots(run: Run, view: RunView, model: SpeedModel | None) -> list[Spec]:
    """Return title, text for those who cannot see it, and specification of each plot with data.

    `detail` marks the plots that follow the table of trials.
    """
    first = [_throughput(view, model), _step_times(view), _memory_by_part(run)]
    details = [_finals(run, view), _memory(run, view), _best_so_far(view)]
    return [
        *(plot for plot in first if plot is not None),
        *({**plot, "detail": True} for plot in details if plot is not None),
    ]


def _best_so_far(view: RunView) -> Spec | None:
    """The best value of the metric over the time of the run."""
    plan, rows = view.plan, []
    best: float | None = None
    for each in sorted(view.ended, key=lambda each: each.ended_s or 0.0):
        admitted = each.value is not None and plan.admits(each.trial.batch)
        if admitted and each.value is not None and plan.objective.is_better(each.value, best):
            best = each.value
        if best is not None:
            row = {"minutes": (each.ended_s or 0.0) / 60, "best": best, "name": each.trial.name}
            rows.append(row)
    line: Spec = {"type": "line", "interpolate": "step-after", "point": True, "color": COLOURS[0]}
    value = _metric(view, "best", f"best {plan.metric} ({fmt.unit(plan.metric)})")
    tips = _tips("name", "minutes", "best")
    encoding = {"x": _number("minutes"), "y": value, "tooltip": tips}
    title, text = f"best {plan.metric} over time", f"The best {plan.metric} measured so far."
    return _plot(title, text, 200, _layer(rows, line, encoding)) if rows else None


def _finals(run: Run, view: RunView) -> Spec | None:
    """Pairs of runs in turns; a line joins each pair."""
    if run.finals is None or run.finals.pick is None or not run.finals.pairs:
        return None
    sign = -1 if view.plan.objective.smaller_is_better else 1
    names = ("yours", run.trials[run.finals.pick.trial_id].name)
    rows = [
        {"pair": number, "which": which, "value": math.exp(sign * log_value)}
        for number, pair in enumerate(run.finals.pairs, start=1)
        for which, log_value in zip(names, pair, strict=True)
    ]
    x = {"field": "pair", "type": "ordinal", "title": "pair of runs", "axis": {"labelAngle": 0}}
    at = {"x": x, "y": {**_metric(view), "scale": {"zero": False}}}
    point = {**at, **_coloured("which", names), "tooltip": _tips("pair", "which", "value")}
    return _plot(
        "the finals",
        "Runs in turns, yours and the best; a line joins the two of a pair.",
        220,
        _layer(rows, "line", {**at, "detail": {"field": "pair"}}),
        _layer(rows, {"type": "point", "filled": True, "size": 90}, point, name="finals"),
    )


def _throughput(view: RunView, model: SpeedModel | None) -> Spec | None:
    """The metric over the micro batch: a line for each strategy, out of memory marked."""
    shown = [_row(each) for each in view.trials if each.trial.kind is not TrialKind.PROFILE]
    if not shown:
        return None
    ran = [row for row in shown if row["value"] is not None]
    lost = [row for row in shown if row["out_of_memory"]]
    band = [] if model is None else model.band()
    upper: dict[Any, Spec] = {}
    for row in map(_row, view.ranked):  # the best of each strategy and micro batch
        upper.setdefault((row["strategy"], row["micro_batch"]), row)
    sizes = sorted({row["micro_batch"] for row in shown})
    powers = [2**n for n in range(30) if sizes[0] <= 2**n <= sizes[-1]]
    x = _number(
        "micro_batch",
        "micro batch (samples per device)",
        scale={"type": "log", "base": 2},
        axis={"values": powers if len(powers) > 1 else sizes},
    )
    y = _metric(view)
    interval = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    names = sorted({str(row["strategy"]) for row in (*ran, *lost, *band)})
    look = _coloured("strategy", names)
    colour = {"color": look["color"]}
    tips = {"tooltip": _tips("name", "shown", "changes")}
    best = {"condition": {"test": "datum.best", "value": _BEST}, "value": None}
    area = {"type": "area", "opacity": 0.15, "clip": True}
    cross = {"type": "text", "text": "✕", "size": 14, "baseline": "middle"}
    at_the_foot = {"value": {"expr": "height - 8"}}
    return _plot(
        f"{view.plan.metric} over the micro batch",
        "One point for each trial with its 95 % interval, a line through the best of each "
        "strategy; ✕ marks trials that ran out of memory. The band is the 95 % interval of the "
        "model of speed, fitted to all of them.",
        320,
        *([_layer(band, area, {**interval, **colour}, name="band")] if band else []),
        _layer(list(upper.values()), {"type": "line", "opacity": 0.5}, {"x": x, "y": y, **colour}),
        _layer(ran, "rule", interval),
        _layer(
            ran,
            {"type": "point", "filled": True, "size": 70},
            {"x": x, "y": y, **look, "stroke": best, "strokeWidth": {"value": 3}, **tips},
            name="ran",
        ),
        _layer(lost, cross, {"x": x, "y": at_the_foot, **colour, **tips}, name="oom"),
    )


def _memory(run: Run, view: RunView) -> Spec | None:
    """Used and predicted memory of the trials that have both, against the limit."""
    known = [each for each in view.ranked if each.used_bytes and each.trial.predicted_bytes]
    rows = [
        {"name": each.trial.name, "which": which, "gib": _gib(size)}
        for each in known[:_MOST_BARS]
        for which, size in (("predicted", each.trial.predicted_bytes), ("used", each.used_bytes))
    ]
    encoding = {
        "y": _bars("name"),
        "yOffset": {"field": "which"},
        "x": _number("gib", "GiB per device"),
        "color": _nominal("which", ["predicted", "used"]),
        "tooltip": _tips("name", "which", "gib"),
    }
    title, text = (
        "memory: predicted and used",
        "The peak of a device; a dashed line is its limit, if it is near.",
    )
    layers = [_layer(rows, "bar", encoding), *_limit(run, rows)]
    return _plot(title, text, {"step": 9}, *layers) if rows else None


def _memory_by_part(run: Run) -> Spec | None:
    """Memory of a slot in each phase by part, and a mark at the measured peak."""
    rows, measured = memory_parts.split_memory(run)
    if not rows:
        return None
    phase = _bars("phase")
    parts = {
        "y": phase,
        "x": _number("gib", "GiB per device", stack=True),
        "color": _nominal("part", memory_parts.PARTS),
        "order": _number("order"),
        "tooltip": _tips("phase", "part", "gib"),
    }
    mark = {"y": phase, "x": _number("gib"), "tooltip": _tips("phase", "what", "gib")}
    tick = {"type": "tick", "thickness": 3, "size": 24, "color": _BEST}
    return _plot(
        "what fills the memory of a device",
        "The best trial in each phase of a step: the parts by ZeRO's formula, the rest of the "
        "measured peak, and a mark at that peak.",
        {"step": 30},
        _layer(rows, "bar", parts, name="parts"),
        _layer(measured, tick, mark, name="measured"),
        *_limit(run, measured),
    )


def _step_times(view: RunView) -> Spec | None:
    """Time of an optimizer step by part, per sample, so that batches compare."""
    rows = []
    for each in view.ranked[:_MOST_BARS]:
        metrics = each.outcome and each.outcome.metrics
        if metrics:
            times = step_parts.milliseconds(metrics)
            name, size = each.trial.name, each.trial.batch.train_batch_size
            rows += [
                {"name": name, "part": part, "ms": time / size, "order": order}
                for order, (part, time) in enumerate(zip(step_parts.PARTS, times, strict=True))
            ]
    encoding = {
        "y": _bars("name"),
        "x": _number("ms", "ms per sample", stack=True),
        "color": _nominal("part", step_parts.PARTS),
        "order": _number("order"),
        "tooltip": _tips("name", "part", "ms"),
    }
    title = "where the time of a step goes"
    text = "Milliseconds per sample of the fastest trials, the best first."
    return _plot(title, text, {"step": 16}, _layer(rows, "bar", encoding)) if rows else None


def _row(each: TrialView) -> dict[str, Any]:
    outcome, batch = each.outcome, each.trial.batch
    ci95 = outcome.metrics.ci95 if outcome and outcome.metrics else 0.0
    return {
        "name": each.trial.name,
        "strategy": fmt.strategy(each.trial.strategy),
        "micro_batch": batch.micro_batch,
        "value": each.value,
        "low": each.value and each.value * (1 - ci95),
        "high": each.value and each.value * (1 + ci95),
        "best": each.is_best,
        "out_of_memory": outcome is not None and outcome.kind.is_out_of_memory,
        "shown": each.result,
        "changes": each.changes,
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
    return {"title": title, "text": text, "spec": spec, "detail": False}


def _layer(rows: Rows, mark: str | Spec, encoding: Spec, name: str | None = None) -> Spec:
    layer: Spec = {"data": {"values": list(rows)}, "mark": mark, "encoding": encoding}
    return layer if name is None else {"name": name, **layer}


def _limit(run: Run, rows: Rows) -> list[Spec]:
    """Return a line at the memory of a slot, unless the bars would be tiny beside it."""
    limit = None if run.profile is None else _gib(run.profile.slot_memory_bytes)
    if limit is None or _SHOWN_LIMIT * max((row["gib"] for row in rows), default=0.0) < limit:
        return []
    mark = {"type": "rule", "strokeDash": [6, 4], "color": _BEST, "strokeWidth": 2}
    encoding = {"x": _number("gib"), "tooltip": _tips("what", "gib")}
    return [_layer([{"gib": limit, "what": "limit"}], mark, encoding)]


def _number(field: str, title: str | None = None, **more: Any) -> Spec:
    found = {"field": field, "type": "quantitative", **more}
    return found if title is None else {**found, "title": title}


def _metric(view: RunView, field: str = "value", title: str = "") -> Spec:
    """The axis of the metric, with 15G instead of 15,000,000,000."""
    metric = view.plan.metric
    return _number(field, title or f"{metric} ({fmt.unit(metric)})", axis={"format": "~s"})


def _bars(field: str) -> Spec:
    title = {"name": "trial"}.get(field, field)
    return {"field": field, "type": "nominal", "sort": None, "title": title}


def _nominal(field: str, domain: Sequence[str]) -> Spec:
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(domain))]
    scale = {"domain": list(domain), "range": colours}
    legend = {"orient": "top", "symbolOpacity": 1}
    return {"field": field, "type": "nominal", "scale": scale, "legend": legend}


def _coloured(field: str, domain: Sequence[str]) -> Spec:
    """Colours and shapes under one legend."""
    colour = _nominal(field, domain)
    shapes = [_SHAPES[number % len(_SHAPES)] for number in range(len(domain))]
    return {
        "color": colour,
        "shape": {**colour, "scale": {"domain": list(domain), "range": shapes}},
    }


def _tips(*fields: str) -> list[Spec]:
    """Return the fields of a tooltip, with no more decimals than are known."""
    return [
        {"field": field, "format": _FORMATS[field]} if field in _FORMATS else {"field": field}
        for field in fields
    ]


def _gib(size_bytes: float | None) -> float | None:
    return None if size_bytes is None else round(size_bytes / _GIB, 4)
