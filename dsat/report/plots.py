"""The report's plots as Vega-Lite 6 specifications, one function each.

Colours are Okabe and Ito's (safe for the colour-blind), and shapes repeat what colours say. All
text of a run reaches a plot as data, never as part of an expression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
Spec = dict[str, Any]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#999999")
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
_TIMES = ("forward", "backward", "step", "other")
_OUT_OF_MEMORY = ("OOM", "HOST_OOM")
_RUNS = "OK"
_SHORT = {"format": "~s"}  # 15G instead of 15,000,000,000


def throughput(rows: Rows, metric: str, unit: str, band: Rows = ()) -> Spec:
    """The metric over the micro batch: a line for each strategy, out of memory marked.

    Args:
        rows: of trials.
        metric: its name.
        unit: of its values.
        band: predictions, each with `strategy`, `micro_batch`, `low` and `high`.
    """
    shown = [row for row in rows if row["kind"] != "profile"]
    ran = [row for row in shown if row["result"] == _RUNS and row.get("value") is not None]
    lost = [row for row in shown if row["result"] in _OUT_OF_MEMORY]
    x = {
        "field": "micro_batch",
        "type": "quantitative",
        "title": "micro batch (samples per slot)",
        "scale": {"type": "log", "base": 2},
    }
    y = {
        "field": "value",
        "type": "quantitative",
        "title": f"{metric} ({unit})",
        "axis": _SHORT,
    }
    colour = _by_strategy([*ran, *lost, *band])
    upper: list[Spec] = [
        _layer(
            _upper_envelope(ran),
            {"type": "line", "opacity": 0.5},
            {"x": x, "y": y, "color": colour},
        ),
        _layer(ran, "rule", {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}),
        _layer(
            ran,
            {"type": "point", "filled": True, "size": 70},
            {
                "x": x,
                "y": y,
                "color": colour,
                "shape": _shape_by(colour),
                "stroke": {
                    "condition": {"test": "datum.best", "value": "#e00000"},
                    "value": None,
                },
                "strokeWidth": {"value": 3},
                "tooltip": _tips("name", "shown", "changes"),
            },
            name="ran",
        ),
        _layer(
            lost,
            {"type": "text", "text": "✕", "size": 14, "baseline": "middle"},
            {
                "x": x,
                "y": {"value": {"expr": "height - 8"}},
                "color": colour,
                "tooltip": _tips("name", "shown", "changes"),
            },
            name="oom",
        ),
    ]
    if band:
        area = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour}
        mark = {"type": "area", "opacity": 0.15, "clip": True}
        upper.insert(0, _layer(band, mark, area, name="band"))
    return _plot({"layer": upper, "height": 320})


def best_so_far(rows: Rows, metric: str, unit: str, over: str) -> Spec:
    """The best value so far `over` "trials" or "minutes"."""
    titles = {"trials": "trials that ended", "minutes": "minutes"}
    encoding = {
        "x": {
            "field": over,
            "type": "quantitative",
            "title": titles[over],
            "axis": {"tickMinStep": 1},
        },
        "y": {
            "field": "best",
            "type": "quantitative",
            "title": f"best {metric} ({unit})",
            "axis": _SHORT,
        },
        "tooltip": _tips("name", over, "best"),
    }
    mark = {"type": "line", "interpolate": "step-after", "point": True, "color": COLOURS[0]}
    return _plot({**_layer(rows, mark, encoding), "height": 200})


def best_of_runs(rows: Rows, metric: str, unit: str, over: str) -> Spec:
    """The best value so far of several runs, as `best_so_far`; rows have `run` besides."""
    spec = best_so_far(rows, metric, unit, over)
    colour = _nominal("run", list(dict.fromkeys(str(row["run"]) for row in rows)))
    spec["encoding"] |= {"color": colour, "strokeDash": {"field": "run", "type": "nominal"}}
    del spec["mark"]["color"]
    return {**spec, "height": 260}


def memory(rows: Rows, limit_gib: float | None) -> Spec:
    """Used and predicted memory of the trials that tell both, against the limit."""
    kept = [row for row in rows if row.get("used_gib") and row.get("predicted_gib")]
    longest = [
        {"name": row["name"], "which": which, "gib": row[field]}
        for row in kept
        for which, field in (("predicted", "predicted_gib"), ("used", "used_gib"))
    ]
    layers = [
        _layer(
            longest,
            "bar",
            {
                "y": {"field": "name", "type": "nominal", "sort": None, "title": None},
                "yOffset": {"field": "which"},
                "x": {"field": "gib", "type": "quantitative", "title": "GiB per slot"},
                "color": _nominal("which", ["predicted", "used"]),
                "tooltip": _tips("name", "which", "gib"),
            },
        )
    ]
    return _plot({"layer": [*layers, *_limit(limit_gib)], "height": {"step": 9}})


def memory_by_part(
    rows: Rows, parts: Sequence[str], measured: Rows, limit_gib: float | None
) -> Spec:
    """Memory of a slot in each phase, by part.

    Args:
        rows: with `phase`, `part`, `gib` and `order`.
        parts: all of them, in their order.
        measured: with `phase`, `gib` and `what`; a mark across the phase's bar.
        limit_gib: what a slot has.
    """
    layer = _layer(
        rows,
        "bar",
        {
            "y": {"field": "phase", "type": "nominal", "sort": None, "title": None},
            "x": {"field": "gib", "type": "quantitative", "title": "GiB per slot", "stack": True},
            "color": _nominal("part", parts),
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": _tips("phase", "part", "gib"),
        },
        name="parts",
    )
    mark = _layer(
        measured,
        {"type": "tick", "thickness": 3, "size": 24, "color": "#e00000"},
        {
            "y": {"field": "phase", "type": "nominal", "sort": None, "title": None},
            "x": {"field": "gib", "type": "quantitative"},
            "tooltip": _tips("phase", "what", "gib"),
        },
        name="measured",
    )
    return _plot({"layer": [layer, mark, *_limit(limit_gib)], "height": {"step": 30}})


def finals(rows: Rows, metric: str, unit: str) -> Spec:
    """Pairs of runs in turns: rows have `pair`, `which` and `value`; a line joins each pair."""
    x = {"field": "pair", "type": "ordinal", "title": "pair of runs", "axis": {"labelAngle": 0}}
    y = {
        "field": "value",
        "type": "quantitative",
        "title": f"{metric} ({unit})",
        "axis": _SHORT,
        "scale": {"zero": False},
    }
    names = list(dict.fromkeys(str(row["which"]) for row in rows))
    colour = _nominal("which", names)
    layers = [
        _layer(rows, "line", {"x": x, "y": y, "detail": {"field": "pair"}}),
        _layer(
            rows,
            {"type": "point", "filled": True, "size": 90},
            {
                "x": x,
                "y": y,
                "color": colour,
                "shape": _shape_by(colour),
                "tooltip": _tips("pair", "which", "value"),
            },
            name="finals",
        ),
    ]
    return _plot({"layer": layers, "height": 220})


def step_times(rows: Rows) -> Spec:
    """Time of an optimizer step by part, per sample, so that batches compare."""
    long = [
        {
            "name": row["name"],
            "part": "data and rest" if part == "other" else part,
            "ms": row[f"{part}_ms"] / row["global_batch"],
            "order": number,
        }
        for row in rows
        if row.get("forward_ms") is not None
        for number, part in enumerate(_TIMES)
    ]
    encoding = {
        "y": {"field": "name", "type": "nominal", "sort": None, "title": None},
        "x": {"field": "ms", "type": "quantitative", "title": "ms per sample", "stack": True},
        "color": _nominal("part", [*_TIMES[:-1], "data and rest"]),
        "order": {"field": "order", "type": "quantitative"},
        "tooltip": _tips("name", "part", "ms"),
    }
    return _plot({**_layer(long, "bar", encoding), "height": {"step": 16}})


def importances(rows: Rows) -> Spec:
    """Effect of each setting, by trials that differ in nothing else."""
    percent = [{**row, "percent": 100 * (row["factor"] - 1)} for row in rows]
    title = "difference between trials that differ in it alone, median (%)"
    encoding = {
        "y": {"field": "setting", "type": "nominal", "sort": None, "title": None},
        "x": {"field": "percent", "type": "quantitative", "title": title},
        "tooltip": _tips("setting", "percent", "pairs"),
    }
    mark = {"type": "bar", "color": COLOURS[0]}
    return _plot({**_layer(percent, mark, encoding), "height": {"step": 18}})


def _layer(rows: Rows, mark: str | Spec, encoding: Spec, name: str | None = None) -> Spec:
    layer: Spec = {"data": {"values": list(rows)}, "mark": mark, "encoding": encoding}
    return layer if name is None else {"name": name, **layer}


def _plot(body: Spec) -> Spec:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        **body,
    }


def _limit(limit_gib: float | None) -> list[Spec]:
    if limit_gib is None:
        return []
    mark = {"type": "rule", "strokeDash": [6, 4], "color": "#e00000", "strokeWidth": 2}
    encoding = {"x": {"field": "gib", "type": "quantitative"}, "tooltip": _tips("what", "gib")}
    return [_layer([{"gib": limit_gib, "what": "a slot has"}], mark, encoding)]


def _by_strategy(rows: Rows) -> Spec:
    return _nominal("strategy", sorted({str(row["strategy"]) for row in rows}))


def _shape_by(colour: Spec) -> Spec:
    """Shapes for what has colours, under one legend."""
    domain = colour["scale"]["domain"]
    shapes = [_SHAPES[number % len(_SHAPES)] for number in range(len(domain))]
    return {**colour, "scale": {"domain": domain, "range": shapes}}


def _nominal(field: str, domain: Sequence[str]) -> Spec:
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(domain))]
    scale = {"domain": list(domain), "range": colours}
    legend = {"orient": "top", "symbolOpacity": 1}
    return {"field": field, "type": "nominal", "scale": scale, "legend": legend}


def _tips(*fields: str) -> list[Spec]:
    return [{"field": field} for field in fields]


def _upper_envelope(rows: Rows) -> list[dict[str, Any]]:
    """Best trial of each strategy and micro batch, for the lines."""
    best: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in rows:
        key = row["strategy"], row["micro_batch"]
        if key not in best or row["rank"] < best[key]["rank"]:
            best[key] = dict(row)
    return list(best.values())
