"""The meter on a device whose clock runs behind the host's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dsat.values.outcome import OutcomeKind
from testing.metered import (
    OPTIONS,
    Clock,
    FakeAccelerator,
    FakeEngine,
    attach,
    measure,
    memory_of,
    metrics_of,
    train,
    use_accelerator,
)

FROM_THE_FIRST = {"start_step": 1, "end_step": 1}


class Device(FakeAccelerator):
    """An asynchronous device: events are marks on its timeline, and reading their times waits."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.waits: list[float] = []
        self.peak = 0
        self.Event = lambda enable_timing: DeviceEvent(self)

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self) -> str:
        return "fake"

    def total_memory(self) -> int:
        return 10**10

    def reset_peak_memory_stats(self) -> None:
        self.peak = 0

    def max_memory_allocated(self) -> int:
        return self.peak

    def max_memory_reserved(self) -> int:
        return 2 * self.peak


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.at_ms = self.device.clock.now_ms

    def synchronize(self) -> None:
        self.device.waits.append(self.at_ms)

    def elapsed_time(self, end: DeviceEvent) -> float:
        return end.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(Clock())
    use_accelerator(monkeypatch, device)
    return device


def test_on_a_device_nothing_waits_inside_the_steps(device: Device) -> None:
    engine = FakeEngine(device.clock)
    attach(engine)
    waits_at: dict[int, int] = {}
    measured = measure(engine, before=lambda step: waits_at.update({step: len(device.waits)}))
    assert measured.metrics is not None
    # Steps of 10 ms: 1 s of warm-up and 2 s measured, and the first look after 3 of them.
    assert [s for s in waits_at if waits_at[s] != waits_at.get(s - 1, 0)] == [3, 104]
    assert measured.metrics.num_steps >= 200
    assert engine.global_steps == 100 + measured.metrics.num_steps
    assert metrics_of(measured).latency == pytest.approx(10)
    assert metrics_of(measured).backward == pytest.approx(5)


def test_a_device_gets_warm_even_if_the_first_step_is_to_be_measured(
    device: Device,
) -> None:
    engine = FakeEngine(device.clock)
    attach(engine, **FROM_THE_FIRST)
    cold = lambda step: setattr(engine, "times_ms", (0, 0, 20 if step <= 50 else 10))  # noqa: E731
    measured = train(engine, before=cold)
    assert metrics_of(measured).latency == pytest.approx(10)


def test_a_script_that_ends_before_the_device_is_warm_is_measured_by_its_last_steps(
    device: Device,
) -> None:
    engine = FakeEngine(device.clock)
    meter = attach(engine)
    slow_at_first = lambda step: setattr(engine, "times_ms", (0, 0, 12 if step < 20 else 9))  # noqa: E731
    assert train(engine, steps=30, before=slow_at_first) is None
    assert meter.outcome is None
    told = meter.at_its_end()
    metrics = metrics_of(told)
    assert metrics.num_steps == OPTIONS.end_step - OPTIONS.start_step + 1
    assert metrics.latency == pytest.approx(9)
    assert any("after 30 optimizer steps, before its device" in w for w in told.warnings)
    assert meter.at_its_end() is told


def test_a_script_that_diverges_before_the_device_is_warm_has_diverged(device: Device) -> None:
    engine = FakeEngine(device.clock)
    meter = attach(engine)
    for _ in range(10):
        engine.backward(torch.tensor(math.nan))
        engine.step()
    assert meter.outcome is None
    assert meter.at_its_end().kind is OutcomeKind.DIVERGED


@pytest.mark.parametrize(
    ("settings", "steps", "measured"),
    [({}, OPTIONS.end_step - 1, None), (FROM_THE_FIRST, 1, 1)],
)
def test_too_few_steps_are_not_measured_whatever_comes(
    device: Device, settings: dict[str, Any], steps: int, measured: int | None
) -> None:
    engine = FakeEngine(device.clock)
    meter = attach(engine, **settings)
    assert train(engine, steps=steps) is None
    told = meter.at_its_end().metrics
    assert (told and told.num_steps) == measured


def test_the_meters_communicator_is_made_before_memory_is_full(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's first collective needs device memory for NCCL's channels."""
    did = list[str]()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: did.append("all-reduce"))

    class Noting(FakeEngine):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            did.append("forward")
            return super().forward(inputs)

    engine = Noting(device.clock)
    attach(engine, slots=2)
    assert did == []
    train(engine, steps=1)
    assert did == ["all-reduce", "forward"]


@pytest.mark.parametrize("whose", ["engine.backward", "loss.backward"])
def test_on_a_device_memory_is_told_by_phase(
    device: Device, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:

    class Allocating(FakeEngine):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            device.peak = max(device.peak, 300)
            return super().forward(inputs)

        def backward(self, loss: torch.Tensor) -> torch.Tensor:
            device.peak = max(device.peak, 500 if self.micro_steps else 700)
            return super().backward(loss)

        def step(self) -> None:
            device.peak = max(device.peak, 400)
            super().step()

    engine = Allocating(device.clock, gas=2)
    backward = engine.backward  # as long as the meter does not see it
    device.peak = 100
    attach(engine, gas=2)
    if whose == "loss.backward":
        monkeypatch.setattr(engine, "backward", backward)
    measured = measure(engine)
    phases = {"init": 100, "forward": 300, "backward": 700, "step": 400}
    assert memory_of(measured).allocated_bytes == phases
    assert memory_of(measured).reserved_bytes == {name: 2 * peak for name, peak in phases.items()}
    assert set(memory_of(measured).host_rss_bytes) == set(phases)
