"""Memory as a search sees it: with the effects of accumulation, and corrected by trials."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsat.memory.forecast import Forecast
from dsat.memory.predictor import Basis
from dsat.run.strategies import make_space
from dsat.space.plan import BY_FORMULA, Plan
from dsat.values.outcome import ModelProfile
from dsat.values.parallelism import Parallelism
from dsat.values.trial import BatchTriple
from testing.helpers import plan_of, ran

MIB, GIB = 2**20, 2**30
PROFILE = ModelProfile(
    num_params=50 * MIB,
    trainable_params=50 * MIB,
    param_bytes=4,
    activation_bytes_per_sample=20 * MIB,
    flops_per_sample=1e12,
    slot_memory_bytes=3 * GIB,
)
BUCKET = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}


def forecast_of(plan: Plan) -> Forecast:
    space = make_space(plan, PROFILE)
    return Forecast(Basis.of_profile(PROFILE, {}), plan, PROFILE, space)


def test_the_largest_may_accumulate_nothing_where_smaller_ones_must() -> None:
    """In stage 1, whole gradients are kept from one micro step to the next."""
    plan = plan_of(memory_model=BY_FORMULA, zero_stages=(1,), slot_memory_bytes=3 * GIB)
    forecast = forecast_of(replace(plan, train_batch_size=128))
    model = forecast.model
    found = {}
    for gas in (1, 2):
        config = {"gradient_accumulation_steps": gas, "zero_optimization": {"stage": 1, **BUCKET}}
        found[gas] = model.largest(model.shape(config, {}))
    assert found[2] < found[1] < 128, "so the largest divisor of 128 that fits accumulates"
    assert forecast.largest({"stage": 1, **BUCKET}) == pytest.approx(found[2])
    for size, expected in ((200, found[1]), (240, found[2])):
        limited = replace(plan, max_train_batch_size=size)
        assert forecast_of(limited).largest({"stage": 1, **BUCKET}) == pytest.approx(expected)


def test_the_formula_is_believed_near_what_ran() -> None:
    plan = plan_of(memory_model=BY_FORMULA, zero_stages=(0, 1), slot_memory_bytes=30 * GIB)
    small = replace(PROFILE, activation_bytes_per_sample=100, slot_memory_bytes=30 * GIB)
    forecast = Forecast(Basis.of_profile(small, {}), plan, small, make_space(plan, small))
    assert forecast.largest({"stage": 0}) > 10**6
    for size in (8, 128):
        own = BatchTriple.on(1, Parallelism(), micro_batch=size).config()
        forecast.learn({**own, "zero_optimization": {"stage": 1}}, {}, ran())
        assert [forecast.largest({"stage": stage}) for stage in (0, 1)] == [16 * size] * 2
