"""Strategies that the installed DeepSpeed trains wrongly are not searched."""

from __future__ import annotations

import logging

import pytest

from dsat.tuning.known_faults import drop_faulty_stages
from dsat.values.trial import BatchTriple
from testing.helpers import plan_of

ACCUMULATES = BatchTriple(16, 2, 4)


@pytest.mark.parametrize(
    ("version", "batch", "is_listed", "stages"),
    [
        ("0.18.2", ACCUMULATES, False, (1, 3)),
        ("0.18.2", ACCUMULATES, True, (1, 2, 3)),  # the user named them
        ("0.18.2", BatchTriple(4, 4, 1), False, (1, 2, 3)),
        ("0.18.3", ACCUMULATES, False, (1, 2, 3)),
        (None, ACCUMULATES, False, (1, 2, 3)),
    ],
)
def test_a_stage_with_a_fault_is_left_out(
    version: str | None, batch: BatchTriple, is_listed: bool, stages: tuple[int, ...]
) -> None:
    plan = plan_of(own_batch=batch, offload_helps=True)
    assert drop_faulty_stages(plan, version, is_listed=is_listed).searched_stages == stages


def test_a_given_global_batch_may_be_accumulated() -> None:
    plan = plan_of(train_batch_size=64, offload_helps=True)
    assert drop_faulty_stages(plan, "0.18.2", is_listed=False).searched_stages == (1, 3)


def test_the_fault_of_ones_own_configuration_is_said_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {"zero_optimization": {"stage": 2}}
    plan = plan_of(own_batch=ACCUMULATES, base_config=config, offload_helps=True)
    with caplog.at_level(logging.WARNING):
        assert drop_faulty_stages(plan, "0.18.2", is_listed=False).searched_stages == (1, 2, 3)
    [said] = caplog.messages
    assert said.startswith("your own configuration has a known fault")
    assert "DeepSpeed#7718" in said and "0.19.5" in said


def test_a_run_goes_on_with_a_version_without_the_fault() -> None:
    plan = plan_of(own_batch=ACCUMULATES, offload_helps=True)
    faulty, sound = (drop_faulty_stages(plan, v, is_listed=False) for v in ("0.18.2", "0.19.8"))
    assert faulty != sound and sound.difference(faulty) is None
