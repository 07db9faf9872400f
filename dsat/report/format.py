"""Numbers for people."""

from __future__ import annotations

from dsat.values import memory_size
from dsat.values.objective import METRIC_NAMES
from dsat.values.outcome import Outcome

_UNITS = {
    "throughput": "samples/s",
    "tokens_per_second": "tokens/s",
    "FLOPS_per_gpu": "FLOP/s per slot",
}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def unit(name: str) -> str:
    """Return the unit of a metric."""
    return _UNITS.get(name, "ms")


def metric(name: str, value: float | None) -> str:
    """Return a metric's value with its unit; a dash for None."""
    assert name in METRIC_NAMES
    if value is None:
        return "-"
    if name == "FLOPS_per_gpu":
        for size, prefix in _PREFIXES:
            if value >= size:
                return f"{value / size:.4g} {prefix}{_UNITS[name]}"
        return f"{value:.4g} {_UNITS[name]}"
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{number} {unit(name)}"


def memory(size_bytes: float | None) -> str:
    """`1.23 GiB`; a dash for None."""
    return "-" if size_bytes is None else memory_size.readable(size_bytes)


def percent(fraction: float) -> str:
    """`1.7 %`."""
    return f"{100 * fraction:.1f} %"


def duration(seconds: float) -> str:
    """`42 s`, `3 min 10 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def outcome(result: Outcome, metric_name: str) -> str:
    """One line on what came of a trial; the profile trial is not for comparing."""
    if result.metrics is None or (result.profile and result.metrics.num_steps <= 1):
        message = shortened(result.message)
        return f"{result.kind.value}: {message}" if message else result.kind.value
    value = metric(metric_name, result.metrics.value(metric_name))
    spread = f"±{percent(result.metrics.ci95)} over {result.metrics.num_steps} steps"
    return f"{value} ({spread})"


def printable(text: str) -> str:
    """Return a text that is safe for a terminal.

    Characters that would move its cursor or change its colours are shown as escapes.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def shortened(text: str, most: int = 400) -> str:
    """A text for one line or cell: its beginning, if it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[:most]} ..."
