"""Numbers formatted for people."""

from __future__ import annotations

import pytest

from dsat.values import format as fmt
from dsat.values.outcome import Metrics, Outcome, OutcomeKind
from dsat.values.table import Table


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("throughput", 1234.5, "1,234 samples/s"),
        ("FLOPS_per_gpu", 9.9999e11, "1 TFLOP/s per device"),
        ("latency", 12.345, "12.35 ms"),
        ("step", None, "-"),
        ("FLOPS_per_gpu", 4.2e14, "420 TFLOP/s per device"),
        ("tokens_per_second", 76_812.3, "76,812 tokens/s"),
    ],
)
def test_metrics_with_units(name: str, value: float | None, text: str) -> None:
    assert fmt.metric(name, value) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [("latency", "12 ms (±5.0 % over 8 steps)"), ("step", "3 ms (over 8 steps)")],
)
def test_only_metrics_with_an_interval_show_one(name: str, text: str) -> None:
    metrics = Metrics(80.0, 12.0, 4.0, 5.0, 3.0, 1e9, num_steps=8, ci95=0.05)
    assert fmt.outcome(Outcome(OutcomeKind.OK, metrics), name) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.2 s"), (42.4, "42 s"), (190, "3 min 10 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert fmt.duration(seconds) == text


def test_tables_are_aligned_and_escaped() -> None:
    table = Table(("a", "b"), [("x|y", "1"), ("long one", "22")], numbers=("b",))
    assert table.markdown() == [
        "| a        |   b |",
        "|:---------|----:|",
        "| x\\|y     |   1 |",
        "| long one |  22 |",
    ]


def test_counts_have_plurals() -> None:
    assert fmt.count(1, "micro batch") == "1 micro batch"
    assert [fmt.count(2, what) for what in ("batch", "process")] == ["2 batches", "2 processes"]
