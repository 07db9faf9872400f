"""Numbers and outcomes as text."""

from __future__ import annotations

from typing import Any

from dsat.values.objective import METRICS
from dsat.values.outcome import Outcome
from dsat.values.text import printable

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
_MOST_OF_A_MESSAGE = 400


def metric(name: str, value: float | None, digits: int = 4) -> str:
    """Return a metric's value with its unit; a dash for None."""
    definition = METRICS[name]
    if value is None:
        return "-"
    if definition.has_prefix:
        return f"{prefixed(value, digits)}{definition.unit}"
    rounded = float(f"{value:.{digits}g}")
    number = f"{value:,.0f}" if rounded >= 1000 else f"{rounded:.{digits}g}"
    return f"{number} {definition.unit}"


def prefixed(value: float, digits: int = 4) -> str:
    """Return a number with an SI prefix, to which the caller appends a unit: `312.4 T`."""
    rounded = float(f"{value:.{digits}g}")
    size, prefix = next((pair for pair in _PREFIXES if rounded >= pair[0]), (1.0, ""))
    return f"{rounded / size:.{digits}g} {prefix}"


def change(name: str, before: float | None, after: float | None) -> str:
    """Return a change: `100 -> 142 samples/s`, or `step 20 -> 15 ms` for a metric in ms."""
    first, second = metric(name, before, digits=3), metric(name, after, digits=3)
    number, _, unit = first.partition(" ")
    if unit and second.endswith(f" {unit}"):
        first = number
    return f"{f'{name} ' if METRICS[name].unit == 'ms' else ''}{first} -> {second}"


def memory(size_bytes: float | None, *, whole: bool = False) -> str:
    """Return a size in KiB, MiB or GiB: `1.23 GiB`, or `24 GiB` if `whole`; a dash for None."""
    if size_bytes is None:
        return "-"
    if 0 < size_bytes < 2**20:
        return f"{size_bytes / 2**10:,.{0 if whole else 1}f} KiB"
    if size_bytes < 2**30:
        return f"{size_bytes / 2**20:,.{0 if whole else 1}f} MiB"
    return f"{size_bytes / 2**30:,.{0 if whole else 2}f} GiB"


def percent(fraction: float) -> str:
    """Return a fraction as a percentage: `1.7 %`."""
    return f"{100 * fraction:.1f} %"


def count(number: int, noun: str) -> str:
    """Return a number of things: `1 trial`, `2 trials` or `2 batches`."""
    plural = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def duration(seconds: float) -> str:
    """Return a duration as text: `42 s`, `3 min 10 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def strategy(name: str) -> str:
    """Return a strategy's name for a table: `2 offload` for `z2_offload`."""
    return name.removeprefix("z").replace("_", " ")


def setting(value: Any) -> str:
    """Return the value of a setting as text; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 10_000:
        return f"{value:,}"
    return str(value)


def outcome(result: Outcome, metric_name: str) -> str:
    """Return one line about a trial's outcome: its metric, or why nothing was measured."""
    if result.metrics is None or (result.profile and result.metrics.num_steps <= 1):
        message = printable(result.message, _MOST_OF_A_MESSAGE)
        return f"{result.kind.value}: {message}" if message else result.kind.value
    value = metric(metric_name, result.metrics.value(metric_name))
    if not METRICS[metric_name].has_interval:
        return f"{value} (over {count(result.metrics.num_steps, 'step')})"
    if result.metrics.num_steps <= 2:
        return f"{value} (too few steps for an interval)"
    if result.metrics.ci95 > 1:
        return f"{value} (too noisy for an interval)"
    return f"{value} (±{percent(result.metrics.ci95)} over {result.metrics.num_steps} steps)"
