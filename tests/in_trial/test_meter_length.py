"""How many steps the meter measures, on engines with scripted times."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsat.in_trial.agreement import Ranks
from dsat.in_trial.measurement import EVALUATED, HOST_ACCIDENTS
from dsat.in_trial.steps import CI_TARGET, relative_ci95
from dsat.values.outcome import Outcome, StepFacts
from testing.metered import (
    OPTIONS,
    Clock,
    FakeEngine,
    attach,
    attached,
    facts_of,
    measure,
    measured_by,
    metrics_of,
    train,
)


def steps_of(clock: Clock, latency_ms: Callable[[int], float], **settings: Any) -> Outcome:
    engine = attached(clock, **settings)

    def script(step: int) -> None:
        engine.times_ms = (0.0, 0.0, latency_ms(step))

    return measure(engine, before=script)


def test_noise_is_measured_up_to_the_most_steps(clock: Clock) -> None:
    measured = steps_of(clock, lambda step: 10.0 if step % 2 else 20.0)
    assert metrics_of(measured).num_steps == 20 == len(measured.step_ms)
    assert metrics_of(measured).ci95 == pytest.approx(relative_ci95([10.0, 20.0] * 10))
    assert metrics_of(measured).latency == pytest.approx(15)


@pytest.mark.parametrize("spread", [0.005, 0.02])
def test_less_noise_needs_fewer_steps(clock: Clock, spread: float) -> None:
    measured = steps_of(clock, lambda step: 10.0 * (1 + spread * (-1) ** step))
    count = metrics_of(measured).num_steps
    assert 3 < count < 20
    assert metrics_of(measured).ci95 <= CI_TARGET
    first = [10.0 * (1 + spread * (-1) ** step) for step in range(3, 6)]
    assert relative_ci95(first) > CI_TARGET


@pytest.mark.parametrize(
    "to_beat",
    [
        {},
        *({"throughput": value} for value in (266.0, 500.0, 1e9)),
        *({"latency": value} for value in (15.1, 8.0, 0.1)),
        {"FLOPS_per_gpu": 1e30},  # without the model's FLOPs nothing is known of the metric
    ],
)
def test_a_trial_that_is_sure_to_be_worse_is_not_measured_closely(
    clock: Clock, to_beat: dict[str, float]
) -> None:
    """It ends as soon as even the better end of its interval is worse."""
    measured = steps_of(clock, lambda step: 20.0 - 10 * (step % 2), to_beat=to_beat)
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
    ("start", "end", "most", "measured"), [(1, 1, 1, 1), (1, 4, 9, 4), (5, 5, 9, 3)]
)
def test_the_range_of_steps(clock: Clock, start: int, end: int, most: int, measured: int) -> None:
    steps = {"start_step": start, "end_step": end, "max_steps": most}
    metrics = metrics_of(steps_of(clock, lambda step: 10.0, **steps))
    assert metrics.num_steps == measured
    assert metrics.ci95 == pytest.approx(1.0 if measured == 1 else 0.0)


@pytest.mark.parametrize(
    ("step_s", "longest_s", "measured"),
    [(1, None, 20), (1, 9.5, 9), (4, 9.5, 3), (12, 9.5, 2), (50, 9.5, 1)],
)
def test_it_measures_no_longer_than_it_may(
    clock: Clock, step_s: float, longest_s: float | None, measured: int
) -> None:
    noisy = steps_of(
        clock, lambda step: 1000 * step_s * (0.9 + 0.2 * (step % 2)), longest_s=longest_s
    )
    assert metrics_of(noisy).num_steps == pytest.approx(measured, abs=1 if measured == 9 else 0)


def test_a_first_step_that_compiles_does_not_cut_it_short(clock: Clock) -> None:
    found = steps_of(
        clock,
        lambda step: 50_000 if step == 1 else 9 + step % 3,
        start_step=2,
        end_step=6,
        longest_s=60.0,
    )
    metrics = metrics_of(found)
    assert metrics.num_steps >= 5


def test_measures_on_after_a_check_without_counting_the_check(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = attached(clock)

    def slow_check(_: Ranks, values: list[float]) -> list[float]:
        clock.advance(10_000)
        return values

    monkeypatch.setattr(Ranks, "maximum", slow_check)
    measured = measure(
        engine, before=lambda step: setattr(engine, "times_ms", (0, 0, 9 + step % 3))
    )
    assert max(measured.step_ms) == pytest.approx(11)


def test_a_script_that_ends_early_leaves_what_was_measured(clock: Clock) -> None:
    engine = FakeEngine(clock)
    meter = attach(engine)
    noisy = lambda step: setattr(engine, "times_ms", (0, 0, 9 + 5 * (step % 2)))  # noqa: E731
    assert train(engine, steps=4, before=noisy) is None
    assert meter.outcome is None and meter.steps == 4
    assert train(engine, steps=2, before=noisy) is None
    assert metrics_of(meter.at_its_end()).num_steps == 3


def test_the_slowest_rank_decides_in_each_step(
    clock: Clock, ranks: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(clock)
    ranks(2)
    meter = attach(engine, slots=2, flops_per_sample=1e9)
    theirs = [
        [latency, 4.0, 1.0, 1.0, 2.0, 8.0, 0.0, 0.0, 0.0, 1.0] for latency in (8.0, 12.0, 12.0)
    ]

    def over_ranks(_: Ranks, values: list[float]) -> list[float]:
        if len(values) != 30:
            return values
        rows = [values[i : i + 10] for i in range(0, 30, 10)]
        return [
            max(a, b)
            for mine, their in zip(rows, theirs, strict=True)
            for a, b in zip(mine, their, strict=True)
        ]

    monkeypatch.setattr(Ranks, "maximum", over_ranks)
    train(engine, steps=5)
    measured = meter.outcome
    assert measured is not None
    assert measured.metrics is not None and measured.metrics.data == 2.0
    assert measured.step_ms == pytest.approx((10, 12, 12))
    assert metrics_of(measured).latency == pytest.approx(34 / 3)
    assert metrics_of(measured).forward == pytest.approx(4)
    assert metrics_of(measured).backward == pytest.approx(5)
    assert metrics_of(measured).throughput == pytest.approx(8 / (34 / 3) * 1e3)
    assert metrics_of(measured).FLOPS_per_gpu == pytest.approx(1e9 * 4 / (34 / 3) * 1e3)


def test_accidents_of_the_host_are_counted_apart(clock: Clock) -> None:
    def latency_ms(step: int) -> float:
        return 50.0 if step == 9 else 10.0 + 0.4 * (step % 3)

    measured = steps_of(clock, latency_ms)
    assert measured.metrics is not None and measured.metrics.accidents == 1
    assert measured.metrics.latency == pytest.approx(10.4, rel=0.01)
    assert HOST_ACCIDENTS in measured.warnings
    assert facts_of(measured) == StepFacts(1, 1, (9,))
    again = steps_of(clock, latency_ms, own_steps=facts_of(measured))
    assert facts_of(again).late == (9,), "left out of both, which are compared"
    assert metrics_of(again).latency == pytest.approx(measured.metrics.latency)
    count = measured.metrics.num_steps
    assert measured.metrics.lost_to_accidents == pytest.approx(39.6 / (10.4 * count), rel=0.02)


@pytest.mark.parametrize(("every", "mean_ms"), [(13, 100.0), (3, 100.0 + 5000 / 3), (1, 5100.0)])
def test_an_evaluation_now_and_then_is_left_out(clock: Clock, every: int, mean_ms: float) -> None:
    engine = FakeEngine(clock)
    attach(engine, end_step=OPTIONS.start_step + 38, max_steps=39)

    def script(step: int) -> None:
        engine.times_ms = (0.0, 0.0, 100.0)
        if step % every == 0:
            clock.advance(5000.0)
            with torch.no_grad():
                engine.forward(torch.zeros(4, 2))

    measured = measure(engine, before=script)
    assert metrics_of(measured).latency == pytest.approx(mean_ms, rel=0.05)
    assert (EVALUATED in measured.warnings) == (every == 13)
    assert facts_of(measured).evaluated == pytest.approx(0 if every == 13 else 1 / every)


class Generating(torch.nn.Linear):
    """A library's model, which may be inside an adapter's model."""

    def generate(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self(inputs)
        return found


@pytest.mark.parametrize("inside", [False, True])
def test_a_generation_that_leaves_the_engine_out_is_seen(clock: Clock, inside: bool) -> None:
    engine, model = FakeEngine(clock), Generating(2, 2)
    engine.module = torch.nn.Sequential(model) if inside else model
    engine.forward = engine.module  # type: ignore[method-assign]
    attach(engine)

    def generates(step: int) -> None:
        if step % 2:
            model.generate(torch.zeros(4, 2))

    measured = measure(engine, before=generates)
    assert facts_of(measured).evaluated == pytest.approx(0.5, abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["by its method", "by torch.compile", "a part"])
def test_a_compiled_model_has_no_hook_that_is_compiled_with_it(clock: Clock, how: str) -> None:
    engine, model = FakeEngine(clock), Generating(2, 2)
    if how == "by torch.compile":
        engine.module = torch.compile(model, backend="eager")
    elif how == "by its method":
        engine.module = model
        model.compile(backend="eager")
    else:
        compiled = torch.nn.Sequential(model)
        compiled.compile(backend="eager", fullgraph=True)
        engine.module = torch.nn.Sequential(compiled)
        engine.forward = engine.module  # type: ignore[method-assign]
    attach(engine)
    assert train(engine) is not None
    assert not model._forward_pre_hooks
    assert bool(engine.module._forward_pre_hooks) == (how == "a part")


@pytest.mark.parametrize("calls_model", [False, True])
def test_a_model_with_hooks_can_be_pickled_and_copied(clock: Clock, calls_model: bool) -> None:
    engine = FakeEngine(clock)
    engine.module = torch.nn.Linear(2, 2)
    meter = attach(engine)
    called, evaluates = [engine.module], False

    def loop() -> None:
        for _ in range(5):
            loss = (engine.module if calls_model else engine.forward)(torch.zeros(4, 2))
            # Scripts pickle a model for other processes, and copy it for an average of weights.
            copies = (pickle.loads(pickle.dumps(engine.module)), copy.deepcopy(engine.module))
            with torch.no_grad():
                for each in called if evaluates else copies:
                    each(torch.zeros(4, 2))
            engine.backward(loss)
            engine.step()

    assert facts_of(measured_by(loop)).evaluated == 0
    engine = FakeEngine(clock)
    engine.module, evaluates = called[0], True
    attach(engine)
    assert facts_of(measured_by(loop)).evaluated == 1
    assert meter.outcome is not None
