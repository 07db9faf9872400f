"""Simulations that predict too much memory, corrected by trials."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsat.memory import closed_form
from dsat.memory.estimate import PHASES, SIMULATED
from dsat.memory.facts import ModelFacts
from dsat.memory.predictor import Anchor, Basis, MemoryModel, Variant
from dsat.values.outcome import MemoryUse, Metrics, Outcome, OutcomeKind

GIB = 2**30
CONFIG = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
MEASURED = Outcome(OutcomeKind.OK, metrics=Metrics(1.0, 1.0, 0.3, 0.5, 0.2, None, 5, 0.01))


def test_three_trials_correct_a_slope_that_is_too_steep() -> None:
    """Simulated are 8 GiB and 4 per sample, used are 8 and 2.8: 24 samples fit, not 17."""
    facts = ModelFacts(
        num_params=10**8,
        trainable_params=10**8,
        largest_param=10**7,
        forward_bytes_per_sample=4.0 * GIB,
        backward_bytes_per_sample=4.0 * GIB,
        first_gradient_bytes_per_sample=4.0 * GIB,
    )
    plain = closed_form.estimate(facts, CONFIG, slots=1, micro_batch=4)
    peaks: dict[str, Any] = dict.fromkeys(PHASES, 24 * GIB)
    anchor = Anchor(CONFIG, 4, replace(plain, **peaks, source=SIMULATED), 1)
    basis = Basis((Variant({}, facts, (anchor,)),))
    memory = MemoryModel(basis, slots=1, limit_bytes=76 * GIB)
    shape = memory.shape(CONFIG, {})
    before = memory.largest(shape)
    for micro_batch in (4, 8, 16):
        used = round((8 + 2.8 * micro_batch) * GIB)
        memory.learn(shape, micro_batch, replace(MEASURED, memory=MemoryUse({"backward": used})))
    assert before < 18
    assert memory.predicted_bytes(shape, 20) == pytest.approx((8 + 2.8 * 20) * GIB, rel=0.03)
    assert 22 <= memory.largest(shape) <= 25
