"""Steps in which torch compiles are not measured."""

from __future__ import annotations

import sys
from collections import Counter, deque
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from dsat.in_trial import compiling
from dsat.in_trial.measurement import ALWAYS_COMPILES, COMPILED
from dsat.values.outcome import Outcome
from testing.metered import Clock, attached, measure, metrics_of

COMPILES_MS, STEP_MS = 30_000.0, 10.0


class Dynamo:
    """Counts compilations as Dynamo does; the test says when they happen."""

    def __init__(self) -> None:
        self.counters = {"frames": Counter[str]()}

    def compile(self) -> float:
        self.counters["frames"]["total"] += 1
        return COMPILES_MS


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> Dynamo:
    dynamo = Dynamo()
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", cast(Any, dynamo))
    return dynamo


def measured(clock: Clock, latency_ms: Any, **settings: Any) -> Outcome:
    engine = attached(clock, **settings)

    def script(step: int) -> None:
        engine.times_ms = (latency_ms(step), 0.0, 0.0)

    return measure(engine, before=script)


@pytest.mark.parametrize("compiled", [(3, 4, 5), (4, 7)])
def test_they_are_left_out_and_made_up_for(
    clock: Clock, dynamo: Dynamo, compiled: tuple[int, ...]
) -> None:
    found = measured(clock, lambda step: dynamo.compile() if step in compiled else STEP_MS)
    assert metrics_of(found).latency == pytest.approx(STEP_MS)
    assert metrics_of(found).num_steps >= 3
    assert found.warnings == (COMPILED,)


def test_a_script_that_compiles_in_every_step_is_measured_and_told(
    clock: Clock, dynamo: Dynamo
) -> None:
    found = measured(clock, lambda _: dynamo.compile(), max_steps=5)
    assert metrics_of(found).latency == pytest.approx(COMPILES_MS)
    assert found.warnings == (ALWAYS_COMPILES,)


def test_deepcompile_has_its_last_plan_before_anything_is_measured(
    clock: Clock, dynamo: Dynamo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps under the earlier plans are slow, whether they compile or not."""
    backend: Any = ModuleType("deepspeed.compile.backend")
    backend.remaining_schedule = deque([(0, ["gather"]), (5, ["gather", "prefetch"])])
    monkeypatch.setitem(sys.modules, backend.__name__, backend)

    def step_ms(step: int) -> float:
        plans = backend.remaining_schedule
        if plans and plans[0][0] == step - 1:  # `launch_compile_passes`, in the forward pass
            plans.popleft()
            return dynamo.compile()
        return STEP_MS if not plans else 3 * STEP_MS

    found = measured(clock, step_ms)
    assert not backend.remaining_schedule
    assert list(found.step_ms) == pytest.approx([STEP_MS] * 3)
    assert found.warnings == ()


class Layer(torch.nn.Linear):
    """A module defined by the script: before torch 2.10, Dynamo does not compile torch's own
    modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.slow
def test_dynamo_itself_is_seen() -> None:
    layer = Layer(4, 4)
    layer.compile(backend="eager")
    before, seen = compiling.count_frames(), []
    for size, cleared in ((2, False), (2, False), (3, False), (3, False), (3, True), (3, False)):
        if cleared:  # as DeepCompile does between two plans
            torch._dynamo.reset()
        layer(torch.ones(size, 4)).sum().backward()
        seen.append(compiling.count_frames() != before)
        before = compiling.count_frames()
    assert seen == [True, False, True, False, True, False]
