"""The text of a projection with made-up rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsat.projecting.projection import Projection, Row, comparison, summary
from dsat.projecting.speed import StepTime
from dsat.search import gpus
from dsat.values.zero_strategy import Strategy

NAMES = ("kernels", "communication", "copies")


@pytest.mark.parametrize(
    ("tokens", "price", "said"),
    [
        (1e12, 2.0, "take 116 days (105 to 127) on 10 GPUs: 27,800 GPU-hours, 55,600 (50,500 to"),
        (
            1e9,
            2.0,
            "take 2.78 hours (2.53 to 3.06) on 10 GPUs: 27.8 GPU-hours, 55.6 (50.5 to 61.1) at",
        ),
        (
            1e7,
            0.2,
            "take 1.67 minutes (1.52 to 1.83) on 10 GPUs: 0.278 GPU-hours, 0.0556 (0.0505 to",
        ),
        (5e5, None, "500,000 tokens take 5 seconds"),
        (100, 1.0, "100 tokens take 1 second (0.909 to 1.1) on 10 GPUs: 0.00278 GPU-hours"),
    ],
)
def test_what_a_training_takes_has_three_digits_whatever_it_is(
    tokens: float, price: float | None, said: str
) -> None:
    time = StepTime(1.0, 1 / 1.1, 1.1, {"kernels": 1.0})
    row = Row(Strategy(1), 10, 10, 1, time, 2**30, True, 100.0, 0.4)
    gpu = gpus.find("H100")
    shown = Projection(
        "tiny",
        gpu,
        10,
        1e9,
        10**6,
        10**6,
        1000,
        "on",
        (),
        {10: (row,)},
        {},
        tokens=tokens,
        price=price,
    )
    assert said in summary(shown)


def test_one_gpu_is_not_plural() -> None:
    shown = Projection("m", gpus.find("H100"), 1, 1e9, 10**9, 10**6, 512, "off", (), {}, {})
    assert "fits 1 GPU." in summary(shown) and "(1,000,000 trained)" in summary(shown)


def test_the_fastest_strategy_has_a_reason() -> None:
    """Its step is 50 ms shorter: communication takes 80 ms less, and copies 30 ms more."""
    rows = []
    for stage, seconds in ((1, (0.5, 0.02, 0.03)), (3, (0.5, 0.1, 0.0))):
        step_s = sum(seconds)
        time = StepTime(step_s, 0.1, 2.0, dict(zip(NAMES, seconds, strict=True)))
        rows.append(Row(Strategy(stage), 8, 4, 2, time, 1, True, 64 / step_s, 0.4))
    gpu = gpus.find("H100")
    shown = Projection("m", gpu, 8, 1e9, 10**6, 10**6, 512, "off", (), {8: tuple(rows)}, {})
    same, why = comparison(shown)
    assert "global batch of 64 samples of 512 tokens" in same and "checkpointing off" in same
    default = comparison(replace(shown, batch_is_default=True))[0]
    assert "tokens (dsat's default; --train-batch-size sets it)" in default
    assert why == (
        "A step with stage 1 takes 50 ms less than with stage 3: the part `communication` takes "
        "80 ms less, and the other parts together 30 ms more."
    )
    near = replace(rows[1], time=replace(rows[0].time, seconds=0.551))
    assert "about equally fast" in comparison(replace(shown, best={8: (rows[0], near)}))[1]
