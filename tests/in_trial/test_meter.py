"""The meter on engines made of scripted times, and its counts against counts by hand."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dsat
from dsat.errors import Diverged, InvalidTrial
from dsat.in_trial import clocks
from dsat.in_trial.meter import (
    HOST_ACCIDENTS,
    SEVERAL_ENGINES,
    SHORT_BATCHES,
    Meter,
    TrialComplete,
    install,
)
from dsat.in_trial.meter_spec import MAX_EXTRA_STEPS, MAX_SKIPPED_STEPS, MeterSpec
from dsat.in_trial.samples import UNCOUNTED
from dsat.in_trial.steps import CI_TARGET, relative_ci95
from dsat.values.outcome import MemoryUse, Metrics, ModelProfile, Outcome, SequenceLengths
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


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    accelerator = FakeAccelerator()
    use_accelerator(monkeypatch, accelerator)
    return accelerator


def use_accelerator(monkeypatch: pytest.MonkeyPatch, accelerator: FakeAccelerator) -> None:
    package, module = ModuleType("deepspeed"), ModuleType("deepspeed.accelerator")
    module.get_accelerator = lambda: accelerator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", module)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, accelerator: FakeAccelerator) -> Clock:
    clock = Clock()
    monkeypatch.setattr(clocks, "time", clock)
    return clock


class FakeEngine:
    """A DeepSpeedEngine as far as the meter knows it; its phases take scripted times."""

    def __init__(self, clock: Clock, micro_batch: int = 4, gas: int = 1, stage: int = 1) -> None:
        self.clock = clock
        self.training = True
        self.optimizer = object()
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


def attach(engine: Any, spec: MeterSpec = SPEC) -> Meter:
    meter = Meter(spec, lambda measurement: None)
    meter.attach(engine)
    return meter


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


def metrics_of(outcome: Outcome | None) -> Metrics:
    assert outcome is not None and outcome.metrics is not None
    return outcome.metrics


def memory_of(outcome: Outcome | None) -> MemoryUse:
    assert outcome is not None and outcome.memory is not None
    return outcome.memory


# -- times


def test_measures_the_mean_step_and_its_phases(clock: Clock) -> None:
    engine = FakeEngine(clock)
    meter = attach(engine)
    measured = train(engine)
    assert measured is not None
    metrics = metrics_of(measured)
    assert (metrics.forward, metrics.backward, metrics.step) == pytest.approx((3, 5, 2))
    assert metrics.latency == pytest.approx(10)
    assert metrics.throughput == pytest.approx(4 / 0.010)
    assert metrics.num_steps == 3 and engine.global_steps == 5 == meter.steps_seen
    assert metrics.ci95 == pytest.approx(0)
    assert metrics.FLOPS_per_gpu is None
    assert measured.step_ms == pytest.approx((10, 10, 10))


def test_the_first_steps_are_not_measured(clock: Clock) -> None:
    engine = FakeEngine(clock)
    attach(engine)

    def slow_at_first(step: int) -> None:
        engine.times_ms = (1000.0, 1000.0, 1000.0) if step < 3 else (3.0, 5.0, 2.0)

    measured = train(engine, before=slow_at_first)
    assert measured is not None and metrics_of(measured).latency == pytest.approx(10)


def test_all_micro_steps_of_a_step_count(clock: Clock) -> None:
    engine = FakeEngine(clock, gas=4)
    attach(engine, replace(SPEC, gas=4, slots=2))
    measured = train(engine)
    assert measured is not None
    metrics = metrics_of(measured)
    assert (metrics.forward, metrics.backward, metrics.step) == pytest.approx((12, 20, 2))
    assert metrics.latency == pytest.approx(34)
    assert metrics.throughput == pytest.approx(4 * 4 * 2 / 0.034)


def test_a_step_that_lacks_micro_steps_is_not_measured(clock: Clock) -> None:
    """At the end of an epoch a Trainer makes a step of what is left, and says so to the engine."""
    engine = FakeEngine(clock, gas=2)
    meter = attach(engine, replace(SPEC, gas=2))
    inputs = torch.zeros(4, 2)

    def loop() -> None:
        for step in range(1, 200):
            for _ in range(1 if step % 2 else 2):
                engine.backward(engine.forward(inputs))
            engine.micro_steps = 1  # the engine is told that this is the boundary
            engine.step()

    with pytest.raises(TrialComplete) as complete:
        loop()
    measured = complete.value.outcome
    assert measured.step_ms == pytest.approx((18, 18, 18))
    assert meter.steps_seen == 8


def test_what_the_loop_does_between_two_steps_counts_in_the_latency_alone(clock: Clock) -> None:
    engine = FakeEngine(clock, gas=2)
    attach(engine, replace(SPEC, gas=2))
    measured = train(engine, loading_ms=50)
    assert measured is not None
    metrics = metrics_of(measured)
    assert metrics.latency == pytest.approx(2 * (50 + 3 + 5) + 2)
    assert (metrics.forward, metrics.backward, metrics.step) == pytest.approx((6, 10, 2))


def test_a_backward_pass_without_the_engine_is_timed_by_what_surrounds_it(clock: Clock) -> None:
    """`loss.backward()` instead of `engine.backward(loss)`."""
    engine = FakeEngine(clock, gas=2)
    attach(engine, replace(SPEC, gas=2))
    inputs = torch.zeros(4, 2)

    def loop() -> None:
        for _ in range(200):
            engine.forward(inputs)
            clock.advance(7)
            engine.step()

    with pytest.raises(TrialComplete) as complete:
        loop()
    metrics = metrics_of(complete.value.outcome)
    assert metrics.backward == pytest.approx(14)
    assert metrics.latency == pytest.approx(2 * (3 + 7) + 2)


def test_evaluation_is_no_training_step(clock: Clock) -> None:
    engine = FakeEngine(clock)
    attach(engine)

    def evaluate(step: int) -> None:
        with torch.no_grad():
            engine.forward(torch.zeros(99, 2))
        engine.training = False
        engine.forward(torch.zeros(99, 2))
        engine.training = True

    measured = train(engine, before=evaluate)
    assert measured is not None
    assert metrics_of(measured).forward == pytest.approx(3)
    assert metrics_of(measured).num_steps == 3
    assert measured.warnings == ()


def test_steps_that_fp16_skipped_are_not_measured(clock: Clock) -> None:
    engine = FakeEngine(clock)
    attach(engine)

    def overflow(step: int) -> None:
        engine.overflows = step <= 7 or step in (9, 12)
        engine.times_ms = (3.0, 5.0, 0.1) if engine.overflows else (3.0, 5.0, 2.0)

    measured = train(engine, before=overflow)
    assert measured is not None
    # Steps 8 and 10 are the first that count; 11, 13 and 14 are measured.
    assert engine.global_steps == 14
    assert measured.step_ms == pytest.approx((10, 10, 10))


def test_a_loss_that_is_never_finite_is_said_so(clock: Clock) -> None:
    engine = FakeEngine(clock)
    attach(engine)
    engine.overflows = True
    with pytest.raises(Diverged, match="the loss is not finite"):
        train(engine, steps=1000)
    assert engine.global_steps == MAX_SKIPPED_STEPS + 1


def test_the_operation_is_long_enough_for_skipped_steps(clock: Clock) -> None:
    engine = FakeEngine(clock)
    attach(engine)

    def worst(step: int) -> None:
        engine.overflows = step <= MAX_SKIPPED_STEPS
        engine.times_ms = (3.0, 5.0, 2.0 if step % 2 else 90.0)

    assert train(engine, before=worst) is not None
    # But for what only an accelerator, or a loader with workers, may need.
    assert engine.global_steps == SPEC.longest - 2 * MAX_EXTRA_STEPS


# -- how many steps


def steps_of(clock: Clock, spec: MeterSpec, latency_ms: Callable[[int], float]) -> Outcome:
    engine = FakeEngine(clock)
    attach(engine, spec)

    def script(step: int) -> None:
        engine.times_ms = (0.0, 0.0, latency_ms(step))

    measured = train(engine, before=script)
    assert measured is not None
    return measured


def test_noise_is_measured_up_to_the_most_steps(clock: Clock) -> None:
    measured = steps_of(clock, SPEC, lambda step: 10.0 if step % 2 else 20.0)
    assert metrics_of(measured).num_steps == 20 == len(measured.step_ms)
    assert metrics_of(measured).ci95 == pytest.approx(relative_ci95([10.0, 20.0] * 10))
    assert metrics_of(measured).latency == pytest.approx(15)


@pytest.mark.parametrize("spread", [0.005, 0.01, 0.02])
def test_less_noise_needs_fewer_steps(clock: Clock, spread: float) -> None:
    measured = steps_of(clock, SPEC, lambda step: 10.0 * (1 + spread * (-1) ** step))
    count = metrics_of(measured).num_steps
    assert 3 < count < 20
    assert metrics_of(measured).ci95 <= CI_TARGET
    first = [10.0 * (1 + spread * (-1) ** step) for step in range(3, 6)]
    assert relative_ci95(first) > CI_TARGET


def test_quiet_steps_end_the_trial_at_once(clock: Clock) -> None:
    measured = steps_of(clock, SPEC, lambda step: 10.0 + 0.01 * (-1) ** step)
    assert metrics_of(measured).num_steps == 3


@pytest.mark.parametrize(
    "to_beat",
    [
        {},
        *({"throughput": value} for value in (266.0, 400.0, 500.0, 700.0, 1000.0, 1e9)),
        *({"latency": value} for value in (15.1, 10.0, 8.0, 5.0, 0.1)),
        # Without the model's FLOPs nothing is known of the metric.
        {"FLOPS_per_gpu": 1e30},
    ],
)
def test_a_trial_that_is_sure_to_be_worse_is_not_measured_closely(
    clock: Clock, to_beat: dict[str, float]
) -> None:
    """It ends as soon as even the better end of its interval is worse."""
    measured = steps_of(clock, replace(SPEC, to_beat=to_beat), lambda step: 20.0 - 10 * (step % 2))
    assert measured.metrics is not None
    values = [10.0 if step % 2 else 20.0 for step in range(3, 23)]
    for count in (3, 6, 12, 20):
        mean, ci95 = sum(values[:count]) / count, relative_ci95(values[:count])
        reached = {"throughput": 4e3 / mean * (1 + ci95), "latency": mean * (1 - ci95)}
        if reached["throughput"] * 0.999 < to_beat.get("throughput", 0.0) * (1 - ci95**2):
            break
        if reached["latency"] > to_beat.get("latency", math.inf):
            break
    assert measured.metrics.num_steps == count
    assert list(measured.step_ms) == values[:count]
    assert measured.metrics.ci95 == pytest.approx(min(1.0, relative_ci95(values[:count])))


@pytest.mark.parametrize(
    ("start", "end", "most", "measured"), [(1, 1, 1, 1), (2, 2, 1, 1), (1, 4, 9, 4), (5, 5, 9, 3)]
)
def test_the_range_of_steps(clock: Clock, start: int, end: int, most: int, measured: int) -> None:
    options = replace(SPEC.options, start_step=start, end_step=end, max_steps=most)
    spec = replace(SPEC, options=options)
    metrics = metrics_of(steps_of(clock, spec, lambda step: 10.0))
    assert metrics.num_steps == measured
    assert metrics.ci95 == pytest.approx(1.0 if measured == 1 else 0.0)


def test_measures_on_after_a_check_without_counting_the_check(clock: Clock) -> None:
    engine = FakeEngine(clock)
    told: list[Outcome] = []
    meter = Meter(SPEC, told.append)
    meter.attach(engine)
    maximum = meter._maximum

    def slow_check(values: list[float]) -> list[float]:
        clock.advance(10_000)
        return maximum(values)

    meter._maximum = slow_check  # type: ignore[method-assign]
    measured = train(engine, before=lambda step: setattr(engine, "times_ms", (0, 0, 9 + step % 3)))
    assert measured is not None and told == [measured]
    assert max(measured.step_ms) == pytest.approx(11)


def test_a_script_that_ends_early_leaves_what_was_measured(clock: Clock) -> None:
    engine = FakeEngine(clock)
    meter = attach(engine)
    noisy = lambda step: setattr(engine, "times_ms", (0, 0, 9 + 5 * (step % 2)))  # noqa: E731
    assert train(engine, steps=4, before=noisy) is None
    assert meter.outcome is None and meter.steps_seen == 4
    assert train(engine, steps=2, before=noisy) is None
    assert meter.outcome is not None
    assert meter.outcome.metrics.num_steps == 3


def test_the_slowest_rank_decides_in_each_step(clock: Clock) -> None:
    engine = FakeEngine(clock)
    meter = attach(engine, replace(SPEC, slots=2))
    theirs = [[latency, 4.0, 1.0, 1.0, 8.0, 0.0] for latency in (8.0, 12.0, 12.0)]

    def over_ranks(values: list[float]) -> list[float]:
        if len(values) != 18:
            return values
        rows = [values[i : i + 6] for i in range(0, 18, 6)]
        return [
            max(a, b)
            for mine, their in zip(rows, theirs, strict=True)
            for a, b in zip(mine, their, strict=True)
        ]

    meter._maximum = over_ranks  # type: ignore[method-assign]
    train(engine, steps=5)
    measured = meter.outcome
    assert measured is not None
    assert measured.step_ms == pytest.approx((10, 12, 12))
    assert metrics_of(measured).latency == pytest.approx(34 / 3)
    assert metrics_of(measured).forward == pytest.approx(4)
    assert metrics_of(measured).backward == pytest.approx(5)
    assert metrics_of(measured).throughput == pytest.approx(8 / (34 / 3) * 1e3)


def test_flops_are_the_profiles_per_sample(clock: Clock) -> None:
    engine = FakeEngine(clock)
    attach(engine, replace(SPEC, slots=4, flops_per_sample=1e9))
    measured = train(engine)
    assert measured is not None
    assert metrics_of(measured).throughput == pytest.approx(1600)
    assert metrics_of(measured).FLOPS_per_gpu == pytest.approx(400e9)


# -- a device whose clock runs behind the host's


class Device(FakeAccelerator):
    """An asynchronous device: events are marks on it, and asking for their times waits."""

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


def test_on_a_device_nothing_waits_inside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    device = Device(clock)
    use_accelerator(monkeypatch, device)
    engine = FakeEngine(clock)
    attach(engine)
    waits_at: dict[int, int] = {}
    measured = train(engine, before=lambda step: waits_at.update({step: len(device.waits)}))
    assert measured is not None and measured.metrics is not None
    # Steps of 10 ms: 1 s of warm-up and 2 s measured, and the first look after 3 of them.
    assert [s for s in waits_at if waits_at[s] != waits_at.get(s - 1, 0)] == [3, 104]
    assert measured.metrics.num_steps >= 200
    assert engine.global_steps == 100 + measured.metrics.num_steps
    assert metrics_of(measured).latency == pytest.approx(10)
    assert metrics_of(measured).backward == pytest.approx(5)


@pytest.mark.parametrize("whose", ["engine.backward", "loss.backward"])
def test_on_a_device_memory_is_told_by_phase(monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    clock = Clock()
    device = Device(clock)
    use_accelerator(monkeypatch, device)

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

    engine = Allocating(clock, gas=2)
    backward = engine.backward  # as long as the meter does not see it
    device.peak = 100
    attach(engine, replace(SPEC, gas=2))
    if whose == "loss.backward":
        monkeypatch.setattr(engine, "backward", backward)
    measured = train(engine)
    assert measured is not None
    phases = {"init": 100, "forward": 300, "backward": 700, "step": 400}
    assert memory_of(measured).allocated_bytes == phases
    assert memory_of(measured).reserved_bytes == {name: 2 * peak for name, peak in phases.items()}
    assert set(memory_of(measured).host_rss_bytes) == set(phases)


# -- what the engine must be


def test_a_pipeline_engine_is_refused(clock: Clock) -> None:
    class PipelineEngine(FakeEngine):
        pass

    class Mine(PipelineEngine):
        pass

    with pytest.raises(InvalidTrial, match="PipelineEngine"):
        Meter(SPEC, print).watch(Mine(clock))


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ((8, 1, 1), "train_micro_batch_size_per_gpu is 8, not 4"),
        ((4, 2, 1), "gradient_accumulation_steps is 2, not 1"),
        ((4, 1, 3), "zero_optimization.stage is 3, not 1"),
    ],
)
def test_an_engine_with_other_settings_is_refused(
    clock: Clock, sizes: tuple[int, int, int], problem: str
) -> None:
    with pytest.raises(InvalidTrial, match=problem):
        attach(FakeEngine(clock, *sizes))


@pytest.mark.parametrize(
    ("shape", "warns"),
    [((4, 9), False), ((9, 4), False), ((4,), False), ((9, 9), True), ((8,), True)],
)
def test_says_what_cannot_be_counted(clock: Clock, shape: tuple[int, ...], warns: bool) -> None:
    engine = FakeEngine(clock)
    meter = attach(engine)
    meter.warn("look")
    measured = train(engine, inputs=torch.zeros(shape))
    assert measured is not None
    assert measured.warnings == ("look", *([UNCOUNTED] if warns else []))


# -- samples that were fed


def feed(engine: FakeEngine, rows: Callable[[int], int], *, per_step: int = 1) -> Outcome:
    """A loop with batches of so many rows, and an optimizer step after so many of them."""

    def loop() -> None:
        for batch in range(1000):
            engine.backward(engine.forward(torch.zeros(rows(batch), 3)).sum())
            if (batch + 1) % per_step == 0:
                engine.step()

    with pytest.raises(TrialComplete) as complete:
        loop()
    return complete.value.outcome


def test_a_first_batch_that_is_short_is_refused(clock: Clock) -> None:
    engine = FakeEngine(clock)
    attach(engine)
    with pytest.raises(InvalidTrial, match="has 3 samples, fewer than the micro batch of 4") as e:
        feed(engine, lambda batch: 3)
    assert e.value.most_samples == 3 and e.value.smaller_may_run


@pytest.mark.parametrize("every", [2, 5])
def test_steps_that_are_not_full_are_not_measured(clock: Clock, every: int) -> None:
    """The last batch of an epoch is short, and quick."""
    engine = FakeEngine(clock)
    attach(engine)

    def rows(batch: int) -> int:
        short = batch % every == every - 1
        engine.times_ms = (1.0, 1.0, 1.0) if short else (3.0, 5.0, 2.0)
        return 1 if short else 4

    measured = feed(engine, rows)
    assert measured.metrics is not None
    assert measured.metrics.latency == pytest.approx(10)
    assert measured.metrics.throughput == pytest.approx(400)
    assert SHORT_BATCHES in measured.warnings


def test_too_few_data_for_a_step_are_told(clock: Clock) -> None:
    """96 samples in batches of 40, three of them a step."""
    engine = FakeEngine(clock, gas=3)
    attach(engine, replace(SPEC, gas=3))
    with pytest.raises(InvalidTrial, match="none of 3 optimizer steps was full") as error:
        train_with(engine, [4, 4, 1])
    assert error.value.smaller_may_run


def train_with(engine: FakeEngine, rows: list[int]) -> None:
    for batch in range(1000):
        engine.backward(engine.forward(torch.zeros(rows[batch % len(rows)], 3)))
        engine.step()


@pytest.mark.parametrize("k", [2, 4])
def test_accumulation_of_the_scripts_own_is_measured_by_real_steps(clock: Clock, k: int) -> None:
    engine = FakeEngine(clock)
    attach(engine)
    measured = feed(engine, lambda batch: 4, per_step=k)
    assert measured.metrics is not None
    assert measured.metrics.latency == pytest.approx(8 * k + 2)
    assert measured.metrics.throughput == pytest.approx(4 * k / (8 * k + 2) * 1e3)
    assert any(f"{k} times as many micro batches" in text for text in measured.warnings)


def test_a_pair_of_calls_for_one_loss_is_one_micro_step(clock: Clock) -> None:
    """Chosen and rejected answers, say."""
    engine = FakeEngine(clock)
    attach(engine)

    def loop() -> None:
        for _ in range(100):
            both = [engine.forward(torch.zeros(4, 3)) for _ in range(2)]
            engine.backward((both[0] - both[1]).sum())
            engine.step()

    with pytest.raises(TrialComplete) as complete:
        loop()
    metrics = complete.value.outcome.metrics
    assert metrics is not None
    assert metrics.throughput == pytest.approx(4 / 0.013)
    assert complete.value.outcome.warnings == ()


def test_accidents_of_the_host_are_counted_apart(clock: Clock) -> None:
    def latency_ms(step: int) -> float:
        return 50.0 if step == 9 else 10.0 + 0.4 * (step % 3)

    measured = steps_of(clock, SPEC, latency_ms)
    assert measured.metrics is not None and measured.metrics.accidents == 1
    assert measured.metrics.latency == pytest.approx(10.4, rel=0.01)
    assert HOST_ACCIDENTS in measured.warnings
    count = measured.metrics.num_steps
    assert measured.metrics.lost_to_accidents == pytest.approx(39.6 / (10.4 * count), rel=0.02)


# -- tokens


def test_tokens_and_lengths_are_measured(clock: Clock) -> None:
    engine = FakeEngine(clock, gas=2)
    engine.module = nn.Linear(2, 2)
    attach(engine, replace(SPEC, gas=2, slots=3))
    measured = train(engine, inputs=torch.ones(4, 50, dtype=torch.long))
    assert metrics_of(measured).throughput == pytest.approx(3 * 8 / 0.018)
    assert metrics_of(measured).tokens_per_second == pytest.approx(3 * 8 * 50 / 0.018)
    assert measured is not None and measured.sequences == SequenceLengths(50, 50)


def test_other_inputs_have_no_tokens(clock: Clock) -> None:
    engine = FakeEngine(clock)
    attach(engine)
    measured = train(engine)
    assert metrics_of(measured).tokens_per_second is None
    assert measured is not None and measured.sequences is None


def varying(clock: Clock, length: Callable[[int], int]) -> Outcome:
    """Batches that take 0.1 ms per token of their length."""
    engine = FakeEngine(clock)
    engine.module = nn.Linear(2, 2)
    attach(engine)

    def feed() -> None:
        for step in range(1, 1000):
            engine.times_ms = (0.05 * length(step), 0.05 * length(step), 0.0)
            engine.backward(engine.forward(torch.ones(4, length(step), dtype=torch.long)))
            engine.step()

    with pytest.raises(TrialComplete) as complete:
        feed()
    return complete.value.outcome


def test_the_interval_is_as_wide_as_lengths_vary(clock: Clock) -> None:
    even = varying(clock, lambda step: 100)
    assert metrics_of(even).ci95 == pytest.approx(0)
    lengths = random.Random(0).choices(range(50, 151), k=1000)
    measured = varying(clock, lambda step: lengths[step])
    metrics = metrics_of(measured)
    assert metrics.num_steps == SPEC.options.max_steps and metrics.ci95 > 0.1
    assert metrics.tokens_per_second == pytest.approx(4 / 0.0001)
    fed = lengths[3 : 3 + metrics.num_steps]
    assert metrics.throughput == pytest.approx(4 * len(fed) / (0.0001 * sum(fed)))
    seen = lengths[1 : 3 + metrics.num_steps]
    assert measured.sequences == SequenceLengths(min(seen), max(seen))


def test_a_long_sequence_is_no_accident_of_the_host(clock: Clock) -> None:
    def length(step: int) -> int:
        return 1000 if step == 9 else 100 + 4 * (step % 3)

    metrics = metrics_of(varying(clock, length))
    assert metrics.accidents == 0 and metrics.ci95 > 0.1
    assert metrics.latency > 11


def test_measures_the_first_engine_that_trains(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reference models may be initialised before it, with or without an optimizer."""
    deepspeed: Any = sys.modules["deepspeed"]

    class DeepSpeedZeRoOffload:
        pass

    def initialize(optimizer: object) -> tuple[FakeEngine, object, None, None]:
        engine = FakeEngine(clock)
        engine.optimizer = optimizer
        return engine, optimizer, None, None

    deepspeed.initialize = initialize
    told: list[Outcome] = []
    meter = install(replace(SPEC, profile=True), told.append)
    monkeypatch.setattr("dsat.in_trial.meter.ModelProfiler", NoProfiler)
    plain, offloaded = (
        deepspeed.initialize(None)[0],
        deepspeed.initialize(DeepSpeedZeRoOffload())[0],
    )
    assert not meter.watches
    reference, trained, second = (deepspeed.initialize("adam")[0] for _ in range(3))
    assert meter.watches and not meter.attached
    inputs = torch.zeros(4)
    for engine in (plain, offloaded, reference):
        with torch.no_grad():
            engine.forward(inputs)
    reference.training = False
    reference.forward(inputs)
    assert not meter.attached
    trained.forward(inputs)
    assert meter.attached
    assert train(second, steps=30) is None
    trained.backward(inputs)
    trained.step()
    assert train(trained) is told[0]
    assert told[0].metrics.latency == pytest.approx(10)
    assert told[0].warnings == (SEVERAL_ENGINES,)


def test_a_script_may_leave_out_the_engines_forward(clock: Clock) -> None:
    deepspeed: Any = sys.modules["deepspeed"]
    deepspeed.initialize = lambda: (FakeEngine(clock), None, None, None)
    told: list[Outcome] = []
    install(SPEC, told.append)
    engine = deepspeed.initialize()[0]
    with pytest.raises(SystemExit):
        backward_only(engine)
    assert metrics_of(told[0]).latency == pytest.approx(7)


def backward_only(engine: FakeEngine) -> None:
    for _ in range(30):
        engine.backward(torch.zeros(()))
        engine.step()


class NoProfiler:
    """Counts nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def enter_forward(self) -> None:
        pass

    leave_forward = enter_forward

    def finish_micro_steps(self, count: int) -> None:
        pass

    def result(self, accelerator: Any) -> ModelProfile:
        return ModelProfile(0, 0, 4, 0, 0.0, 2**30)


# -- counting the model


class RealEngine:
    """As much of a DeepSpeedEngine as it takes to train a module."""

    def __init__(self, module: nn.Module, gas: int = 1) -> None:
        self.module = module
        self.training = True
        self.global_steps = self.skipped_steps = self.micro_steps = 0
        self.device = torch.device("cpu")
        self.gas = gas
        trained = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, 0.1)

    def train_micro_batch_size_per_gpu(self) -> int:
        return BATCH

    def gradient_accumulation_steps(self) -> int:
        return self.gas

    def zero_optimization_stage(self) -> int:
        return 1

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.module(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.gas == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_steps += 1


BATCH, WIDE, HIDDEN, OUT = 6, 10, 24, 3


class Perceptron(nn.Module):
    """Two layers, the loss inside; the hidden part is checkpointed if asked for."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDE, HIDDEN)
        self.second = nn.Linear(HIDDEN, OUT)
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor
        if self.reentrant is None:
            outputs = self.body(inputs)
        else:
            outputs = checkpoint(self.body, inputs, use_reentrant=self.reentrant)
        return nn.functional.mse_loss(outputs, targets)

    def body(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(torch.relu(self.first(inputs)))
        return outputs


def profile_of(
    module: nn.Module,
    *,
    gas: int = 1,
    backward: Callable[[RealEngine, torch.Tensor], None] = RealEngine.backward,
    inputs_need_grad: bool = False,
    evaluate_first: bool = False,
    slot_memory_bytes: int | None = None,
) -> ModelProfile:
    options = TrialOptions(
        timeout_s=60.0, start_step=2, end_step=2, max_steps=1, slot_memory_bytes=slot_memory_bytes
    )
    spec = MeterSpec(options, micro_batch=BATCH, gas=gas, stage=1, slots=1, profile=True)
    engine = RealEngine(module, gas)
    attach(engine, spec)
    inputs = torch.randn(BATCH, WIDE, requires_grad=inputs_need_grad)
    targets = torch.randn(BATCH, OUT)
    if evaluate_first:
        with torch.no_grad():
            engine.forward(inputs, targets)

    def loop() -> None:
        for _ in range(99):
            backward(engine, engine.forward(inputs, targets))
            engine.step()

    with pytest.raises(TrialComplete) as complete:
        loop()
    profile, metrics = complete.value.outcome.profile, complete.value.outcome.metrics
    assert profile is not None and metrics is not None
    assert metrics.FLOPS_per_gpu == pytest.approx(profile.flops_per_sample * metrics.throughput)
    return profile


# Forward, and the weights' gradients, in both layers; the inputs' gradient in the second alone.
FLOPS = 2 * (2 * (WIDE * HIDDEN + HIDDEN * OUT) + HIDDEN * OUT)
INPUT_FLOPS = 2 * WIDE * HIDDEN


@pytest.mark.usefixtures("accelerator")
class TestCounts:
    def test_flops_of_a_perceptron(self) -> None:
        assert profile_of(Perceptron()).flops_per_sample == FLOPS

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_recomputation_earns_nothing(self, reentrant: bool) -> None:
        """A reentrant checkpoint needs an input with a gradient, which is counted then as well."""
        plain = profile_of(Perceptron(), inputs_need_grad=True).flops_per_sample
        assert plain == FLOPS + INPUT_FLOPS
        again = profile_of(Perceptron(reentrant), inputs_need_grad=True).flops_per_sample
        assert again == plain

    @pytest.mark.parametrize("gas", [1, 3])
    def test_flops_are_per_sample_whatever_the_accumulation(self, gas: int) -> None:
        assert profile_of(Perceptron(), gas=gas).flops_per_sample == FLOPS

    def test_flops_when_the_script_calls_backward_itself(self) -> None:
        def backward(engine: RealEngine, loss: torch.Tensor) -> None:
            loss.backward()  # type: ignore[no-untyped-call]

        assert profile_of(Perceptron(), backward=backward).flops_per_sample == FLOPS

    def test_an_evaluation_before_is_not_counted(self) -> None:
        assert profile_of(Perceptron(), evaluate_first=True).flops_per_sample == FLOPS

    def test_activations_of_a_perceptron(self) -> None:
        """The input, what relu returned, and the outputs and targets in the loss."""
        kept = profile_of(Perceptron()).activation_bytes_per_sample
        assert kept == 4 * (WIDE + HIDDEN + 2 * OUT)

    def test_checkpointed_activations_are_not_kept(self) -> None:
        plain = profile_of(Perceptron(), inputs_need_grad=True).activation_bytes_per_sample
        kept = profile_of(Perceptron(False), inputs_need_grad=True).activation_bytes_per_sample
        assert kept <= plain - 4 * HIDDEN

    def test_parameters(self) -> None:
        profile = profile_of(Perceptron())
        first, second = WIDE * HIDDEN + HIDDEN, HIDDEN * OUT + OUT
        assert profile.num_params == profile.trainable_params == first + second
        assert profile.param_bytes == 4

    def test_frozen_parameters_are_not_trained(self) -> None:
        module = Perceptron()
        module.first.requires_grad_(False)
        profile = profile_of(module)
        first, second = WIDE * HIDDEN + HIDDEN, HIDDEN * OUT + OUT
        assert profile.num_params == first + second
        assert profile.trainable_params == second
        # No gradient of the frozen weights, nor of what goes into the second layer.
        assert profile.flops_per_sample == 2 * (WIDE * HIDDEN + 2 * HIDDEN * OUT)

    def test_partitioned_parameters_count_whole(self) -> None:
        """ZeRO stage 3 keeps an empty tensor whose `ds_numel` says how large it was."""
        module = Perceptron()
        size = module.first.weight.numel()
        module.first.weight.ds_numel = 5 * size  # type: ignore[attr-defined]
        assert profile_of(module).num_params == 5 * size + HIDDEN + HIDDEN * OUT + OUT

    def test_memory_of_a_slot_is_no_more_than_it_may_use(self) -> None:
        assert profile_of(Perceptron(), slot_memory_bytes=12345).slot_memory_bytes == 12345
        assert profile_of(Perceptron()).slot_memory_bytes > 2**20


# -- what the user's script sees


class FakeCore:
    """A Core API context that remembers what was reported."""

    def __init__(self, rank: int = 0) -> None:
        self.distributed = SimpleNamespace(rank=rank)
        self.train = self
        self.reports: list[tuple[int, dict[str, Any]]] = []

    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self.reports.append((steps_completed, metrics))


class FakeOperation:
    length = 77

    def __init__(self) -> None:
        self.completed: list[Any] = []

    def report_completed(self, metric: Any) -> None:
        self.completed.append(metric)


@pytest.fixture
def complete(clock: Clock) -> TrialComplete:
    engine = FakeEngine(clock)
    attach(engine)
    measured = train(engine)
    assert measured is not None
    return TrialComplete(measured)


def test_ends_the_script_as_one_that_is_done(complete: TrialComplete) -> None:
    assert isinstance(complete, SystemExit)
    assert complete.code == 0


@pytest.mark.parametrize(("steps", "reported"), [(None, 77), (12, 12), (0, 0)])
def test_the_context_reports_what_was_measured(
    complete: TrialComplete, steps: int | None, reported: int
) -> None:
    core, operation = FakeCore(), FakeOperation()
    with pytest.raises(SystemExit) as left, dsat.dsat_reporting_context(core, operation, steps):
        raise complete
    assert left.value is complete
    metrics = metrics_of(complete.outcome).to_json()
    assert core.reports == [(reported, metrics)]
    assert operation.completed == [metrics]


def test_the_context_reports_on_the_chief_alone(complete: TrialComplete) -> None:
    core, operation = FakeCore(rank=1), FakeOperation()
    with pytest.raises(SystemExit), dsat.dsat_reporting_context(core, operation):
        raise complete
    assert core.reports == [] == operation.completed


@pytest.mark.parametrize("error", [None, ValueError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_outside_a_dsat_run_the_context_does_nothing(error: BaseException | None) -> None:
    core, operation = FakeCore(), FakeOperation()
    if error is None:
        with dsat.dsat_reporting_context(core, operation):
            pass
    else:
        with pytest.raises(type(error)) as left, dsat.dsat_reporting_context(core, operation):
            raise error
        assert left.value is error
    assert core.reports == [] == operation.completed
