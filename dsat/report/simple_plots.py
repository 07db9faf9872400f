"""Drawings for the report where there is no vl-convert: inline SVG without any script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from dsat.report.plots import COLOURS

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 300, 70, 40, 24


def drawings(rows: Sequence[Mapping[str, Any]], metric: str) -> list[dict[str, str]]:
    """Title and SVG of each drawing: the metric over the micro batch."""
    shown = [row for row in rows if row["kind"] != "profile" and row.get("value") is not None]
    if not shown:
        return []
    return [{"title": f"{metric} over the micro batch", "svg": _scatter(shown)}]


def _scatter(rows: Sequence[Mapping[str, Any]]) -> str:
    strategies = sorted({str(row["strategy"]) for row in rows})
    octaves = [math.log2(row["micro_batch"]) for row in rows]
    left, right = min(octaves), max(max(octaves), min(octaves) + 1)
    top = max(row["value"] for row in rows) * 1.05 or 1.0

    def x(octave: float) -> float:
        return _LEFT + (octave - left) / (right - left) * (_WIDTH - _LEFT - 20)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _BOTTOM - _TOP)

    parts = []
    for power in range(math.ceil(left), math.floor(right) + 1):
        parts.append(_text(x(power), _HEIGHT - _BOTTOM + 18, f"{2**power}", "middle"))
    for share in (0.0, 0.5, 1.0):
        parts.append(_text(_LEFT - 8, y(share * top) + 4, f"{share * top:.3g}", "end"))
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y(share * top):.1f}" '
            f'y2="{y(share * top):.1f}" stroke="currentColor" opacity="0.2"/>'
        )
    for row, octave in zip(rows, octaves, strict=True):
        colour = COLOURS[strategies.index(str(row["strategy"])) % len(COLOURS)]
        parts.append(
            f'<circle cx="{x(octave):.1f}" cy="{y(row["value"]):.1f}" r="5" fill="{colour}">'
            f"<title>{escape(str(row['name']))}: {escape(str(row['shown']))}</title></circle>"
        )
    for number, strategy in enumerate(strategies):
        at = _LEFT + 110 * number
        parts.append(f'<circle cx="{at}" cy="10" r="5" fill="{COLOURS[number % len(COLOURS)]}"/>')
        parts.append(_text(at + 10, 14, f"stage {strategy}", "start"))
    parts.append(_text(_WIDTH / 2, _HEIGHT - 4, "micro batch (samples per slot)", "middle"))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="the metric over the micro '
        f'batch, one point for each trial">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" fill="currentColor">'
        f"{escape(text)}</text>"
    )
