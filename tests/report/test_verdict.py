"""What is said of the best configuration: by what gain, how sure, at which batch size."""

from __future__ import annotations

import re

import pytest

from dsat.report import summary
from dsat.report.verdict import gain, knee, knee_row, learning_rate_advice, say_gain, verdict
from dsat.tuning.finals import Gain
from testing.helpers import failed, plan_of, ran
from tests.report.test_summary import run_of
from tests.tuning.test_finals_phase import ran_to_the_end


def test_the_best_is_compared_with_the_users_own() -> None:
    said = " ".join(verdict(run_of((1, 8, ran(150)), baseline=ran(100))))
    assert "Best: t2, 150 samples/s" in said
    assert "1.50 times as good" in said


def test_smaller_is_better_for_latency() -> None:
    plan = plan_of(metric="latency")
    slow, fast = ran(30, "latency"), ran(20, "latency")
    run = run_of((1, 8, fast), baseline=slow, plan=plan)
    assert run.best is not None
    assert run.best.name == "t2"
    assert "1.50 times as good" in " ".join(verdict(run))


def test_the_users_own_may_be_the_best() -> None:
    said = verdict(run_of((1, 8, ran(50)), baseline=ran(100)))
    assert "That is your own configuration: nothing faster was found." in said


def test_the_users_own_may_not_run_or_not_be_measured() -> None:
    said = " ".join(verdict(run_of((1, 8, ran(50)), baseline=failed("OOM", "too big"))))
    assert "Your own configuration did not run: OOM: too big" in said
    assert "was not measured" in " ".join(verdict(run_of((1, 8, ran(50)))))


def test_nothing_ran() -> None:
    assert verdict(run_of((1, 8, failed("OOM")))) == ["No configuration ran."]


@pytest.mark.parametrize(
    ("optimizer", "advice"),
    [
        ({"type": "AdamW"}, "sqrt(32/8) = 2."),
        ({"type": "SGD"}, "multiply it by 32/8 = 4."),
        (None, "with an Adam-like optimizer multiply it by sqrt(32/8) = 2, with SGD multiply it"),
    ],
)
def test_learning_rate_advice(optimizer: dict[str, str] | None, advice: str) -> None:
    base = {"optimizer": optimizer} if optimizer else {}
    said = learning_rate_advice(run_of((1, 16, ran(150)), base=base))
    assert len(said) == 1
    assert advice in said[0]
    assert "from 8 to 32" in said[0]


def test_no_learning_rate_advice_for_the_same_batch() -> None:
    assert learning_rate_advice(run_of((1, 4, ran(150)))) == []


def test_without_finals_the_gain_is_said_to_be_unconfirmed() -> None:
    said = " ".join(verdict(run_of((1, 8, ran(150)), baseline=ran(100))))
    assert "flatters its best; no finals were run to confirm it" in said


# -- after finals


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Gain(1.4209, 1.3811, 1.4604), "1.42x (1.38 to 1.46)"),
        (Gain(1.0153, 1.0121, 1.0185), "1.015x (1.012 to 1.018)"),
    ],
)
def test_a_gain_with_its_interval(found: Gain, said: str) -> None:
    assert say_gain(found) == said


def test_a_confirmed_gain_is_that_of_the_finals() -> None:
    run = ran_to_the_end(speeds={10: 1.5}, luck={10: 1.2})
    assert run.best is not None and run.best is run.leader
    said = " ".join(verdict(run))
    found = gain(run)
    assert found is not None and found.low < 1.5 < found.high < 1.7, "1.8 by the search"
    assert f"It is {say_gain(found)} your own configuration; 95 % interval of 2 pairs" in said
    assert "differed from itself by" in said


def test_a_gain_that_is_luck_leaves_the_users_own() -> None:
    run = ran_to_the_end(speeds={10: 1.0}, luck={10: 1.2})
    assert run.best is run.baseline and run.leader is not run.baseline
    said = " ".join(verdict(run))
    assert "No significant difference: keep your own configuration." in said
    assert run.best is not None
    own = run.plan.config({}) if run.plan else {}
    config = summary.best_config(run) or {}
    assert config["zero_optimization"] == own["zero_optimization"]


def test_the_gain_at_the_same_global_batch_is_told() -> None:
    run = ran_to_the_end(speeds={10: 1.5}, batches=True)
    said = " ".join(verdict(run))
    assert re.search(r"At your own global batch of 8 the gain is 1\.\d+x \(", said)
    assert "so the learning rate should too" in said


def test_a_batch_alone_is_no_gain_at_the_same_batch() -> None:
    run = ran_to_the_end(speeds={}, batches=True)
    said = " ".join(verdict(run))
    assert "At your own global batch of 8 it would be your own configuration" in said


# -- the knee


def test_the_knee_is_where_larger_batches_gain_no_more() -> None:
    values = {1: 10, 2: 19, 4: 33, 8: 40, 16: 40.4}
    run = run_of(*((1, size, ran(value)) for size, value in values.items()))
    rows = knee(run)
    assert [(size, value) for size, value, _ in rows] == list(values.items())
    assert rows[-1][2] == 1.0 and rows[0][2] == pytest.approx(10 / 40.4)
    assert knee_row(rows, 0.02) == 8
    assert knee_row(rows, 0.0) == 16
    assert knee_row(rows[:2], 0.02) is None
    assert "99.0% (knee)" in summary.markdown(run, "train")
