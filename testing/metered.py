"""Engines made of scripted times, for the meter to measure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch

from dsat.in_trial.meter import Meter, TrialComplete
from dsat.in_trial.meter_spec import MeterSpec
from dsat.values.outcome import MemoryUse, Metrics, Outcome, StepFacts
from dsat.values.trial import TrialOptions

SPEC = MeterSpec(TrialOptions(timeout_s=60.0, end_step=5), micro_batch=4, gas=1, stage=1, slots=1)


class Clock:
    """Time passes only when told to."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def perf_counter(self) -> float:
        return self.now_ms / 1e3

    def advance(self, milliseconds: float) -> None:
        self.now_ms += milliseconds


class FakeAccelerator:
    """A CPU to the meter, as DeepSpeed describes it."""

    Event: Any = None

    def is_synchronized_device(self) -> bool:
        return True

    def device_name(self) -> str:
        return "cpu"


def use_accelerator(monkeypatch: pytest.MonkeyPatch, accelerator: FakeAccelerator) -> None:
    package, module = ModuleType("deepspeed"), ModuleType("deepspeed.accelerator")
    module.get_accelerator = lambda: accelerator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", module)


class FakeEngine:
    """A DeepSpeedEngine as far as the meter knows it; its phases take scripted times."""

    def __init__(self, clock: Clock, micro_batch: int = 4, gas: int = 1, stage: int = 1) -> None:
        self.clock = clock
        self.training = True
        self.optimizer = self.basic_optimizer = object()
        self.module: Any = torch.nn.Linear(1, 1)
        self.global_steps = self.skipped_steps = self.micro_steps = 0
        self.device = torch.device("cpu")
        self.times_ms = (3.0, 5.0, 2.0)
        self.overflows = False
        self._sizes = (micro_batch, gas, stage)

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._sizes[0]

    def gradient_accumulation_steps(self) -> int:
        return self._sizes[1]

    def zero_optimization_stage(self) -> int:
        return self._sizes[2]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.clock.advance(self.times_ms[0])
        return inputs

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        self.clock.advance(self.times_ms[1])
        return loss

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self._sizes[1]:
            return
        self.clock.advance(self.times_ms[2])
        self.global_steps += 1
        self.skipped_steps += self.overflows


@dataclass
class CoreContext:
    """A `core.Context`, its train and searcher contexts, and an operation, all in one."""

    rank: int = 0
    calls: list[tuple[str, Any]] = field(default_factory=list)
    length = 77
    steps_completed = -1

    @property
    def distributed(self) -> CoreContext:
        return self

    train = distributed

    def report_validation_metrics(self, steps_completed: int, metrics: Any) -> None:
        self.steps_completed = steps_completed
        self.calls.append(("metrics", metrics))

    def report_progress(self, length: float) -> None:
        self.calls.append(("progress", length))

    def report_completed(self, metric: Any) -> None:
        self.calls.append(("completed", metric))


def attach(engine: Any, spec: MeterSpec = SPEC) -> Meter:
    meter = Meter(spec, lambda measurement: None)
    meter.watch(engine)
    meter.attach(engine)
    return meter


def attached(clock: Clock, spec: MeterSpec = SPEC) -> FakeEngine:
    """An engine that is measured."""
    engine = FakeEngine(clock, gas=spec.gas)
    attach(engine, spec)
    return engine


def train(
    engine: FakeEngine,
    *,
    steps: int = 2000,
    before: Callable[[int], None] = lambda step: None,
    loading_ms: float = 0.0,
    inputs: torch.Tensor | None = None,
) -> Outcome | None:
    """The user's loop; what was measured, if it was ended for that."""
    inputs = torch.zeros(engine.train_micro_batch_size_per_gpu(), 2) if inputs is None else inputs
    try:
        for step in range(1, steps + 1):
            before(step)
            for _ in range(engine.gradient_accumulation_steps()):
                engine.clock.advance(loading_ms)
                engine.backward(engine.forward(inputs))
                engine.step()
    except TrialComplete as complete:
        return complete.outcome
    return None


def measured_by(loop: Callable[[], None]) -> Outcome:
    """What was measured of a script's loop, which ends for that."""
    with pytest.raises(TrialComplete) as complete:
        loop()
    return complete.value.outcome


def measure(engine: FakeEngine, **options: Any) -> Outcome:
    """What was measured of the user's loop, which `train` is."""
    measured = train(engine, **options)
    assert measured is not None
    return measured


def metrics_of(outcome: Outcome | None) -> Metrics:
    assert outcome is not None and outcome.metrics is not None
    return outcome.metrics


def facts_of(outcome: Outcome | None) -> StepFacts:
    assert outcome is not None and outcome.training is not None
    assert outcome.training.facts is not None
    return outcome.training.facts


def memory_of(outcome: Outcome | None) -> MemoryUse:
    assert outcome is not None and outcome.memory is not None
    return outcome.memory
