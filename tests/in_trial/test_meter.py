"""The parts of a step that the meter measures, on engines with scripted times."""

from __future__ import annotations

import contextlib

import pytest
import torch

from dsat.errors import InvalidTrial
from dsat.in_trial.adapters.trial import TRIAL
from dsat.in_trial.batches import UNSEEN
from dsat.in_trial.config_injection import SEVERAL_ENGINES
from dsat.in_trial.measurement import STORE_NOT_USED_UP
from dsat.in_trial.meter_spec import MAX_EXTRA_STEPS, MAX_SKIPPED_STEPS
from dsat.values.outcome import OutcomeKind
from testing.metered import (
    LONGEST,
    Clock,
    FakeEngine,
    attach,
    attached,
    initialize,
    measure,
    measured_by,
    metrics_of,
    train,
    watched,
)

# -- times


def test_measures_the_mean_step_and_its_phases(clock: Clock) -> None:
    engine = FakeEngine(clock)
    meter = attach(engine)
    measured = measure(engine)
    assert meter.reported == [measured]
    metrics = metrics_of(measured)
    assert (metrics.forward, metrics.backward, metrics.step) == pytest.approx((3, 5, 2))
    assert metrics.latency == pytest.approx(10)
    assert metrics.throughput == pytest.approx(4 / 0.010)
    assert metrics.num_steps == 3 and engine.global_steps == 5 == meter.steps
    assert metrics.ci95 == pytest.approx(0)
    assert metrics.FLOPS_per_gpu is None
    assert measured.step_ms == pytest.approx((10, 10, 10))


def test_a_step_that_lacks_micro_steps_is_not_measured(clock: Clock) -> None:
    """At the end of an epoch, a Trainer makes such a step, and marks the boundary itself."""
    engine = FakeEngine(clock, gas=2)
    meter = attach(engine, gas=2)
    inputs = torch.zeros(4, 2)

    def loop() -> None:
        for step in range(1, 200):
            for _ in range(1 if step % 2 else 2):
                engine.backward(engine.forward(inputs))
            engine.micro_steps = 1  # the engine is told that this is the boundary
            engine.step()

    measured = measured_by(loop)
    assert measured.step_ms == pytest.approx((18, 18, 18))
    assert meter.steps == 8


def test_what_the_loop_does_between_two_steps_counts_in_the_latency_alone(clock: Clock) -> None:
    engine = attached(clock, gas=2)
    measured = measure(engine, loading_ms=50)
    metrics = metrics_of(measured)
    assert metrics.latency == pytest.approx(2 * (50 + 3 + 5) + 2)
    assert (metrics.forward, metrics.backward, metrics.step) == pytest.approx((6, 10, 2))


def test_a_backward_pass_without_the_engine_is_timed_by_what_surrounds_it(clock: Clock) -> None:
    """The script calls `loss.backward()` instead of `engine.backward(loss)`."""
    engine = attached(clock, gas=2)
    inputs = torch.zeros(4, 2)

    def loop() -> None:
        for _ in range(200):
            engine.forward(inputs)
            clock.advance(7)
            engine.step()

    metrics = metrics_of(measured_by(loop))
    assert metrics.backward == pytest.approx(14)
    assert metrics.latency == pytest.approx(2 * (3 + 7) + 2)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), OutcomeKind.OOM),
        (InvalidTrial("the script feeds 8 samples"), OutcomeKind.INVALID),
    ],
)
def test_a_script_cannot_go_on_after_what_ends_the_trial(
    clock: Clock, error: Exception, kind: OutcomeKind
) -> None:
    engine, forward = FakeEngine(clock), FakeEngine.forward

    def fails(inputs: torch.Tensor) -> torch.Tensor:
        if engine.global_steps == 2:
            raise error
        return forward(engine, inputs)

    engine.forward = fails  # type: ignore[method-assign]
    meter = attach(engine)

    def loop() -> None:
        for _ in range(200):
            with contextlib.suppress(Exception):  # skipping a bad batch
                engine.backward(engine.forward(torch.zeros(4, 2)))
                engine.step()

    found = measured_by(loop)
    assert meter.reported == [found] == [meter.outcome]
    assert (found.kind, meter.steps) == (kind, 2)
    assert str(error)[:13].lower() in found.message.lower()


@pytest.mark.parametrize("rows", [4, 12])
def test_memory_that_runs_out_with_the_users_batch_says_nothing_about_the_trials(
    clock: Clock, rows: int
) -> None:
    """A script with a batch size of its own may fit with the trial's."""
    engine = FakeEngine(clock)

    def fails(loss: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    engine.backward = fails  # type: ignore[method-assign]
    meter = attach(engine, own_micro_batch=12)
    with pytest.raises(MemoryError) as caught:
        engine.backward(engine.forward(torch.zeros(rows, 3)))
    assert TRIAL.meter is not None
    expected = (OutcomeKind.OOM, None) if rows == 4 else (OutcomeKind.INVALID, 12)
    for found in (meter.outcome, TRIAL.meter.describe(caught.value)):  # caught, and not
        assert found is not None and (found.kind, found.fixed_batch) == expected


def test_an_evaluation_that_runs_out_of_memory_is_the_scripts_own_affair(clock: Clock) -> None:
    engine, forward = FakeEngine(clock), FakeEngine.forward

    def fails(inputs: torch.Tensor) -> torch.Tensor:
        if not engine.training:
            raise MemoryError
        return forward(engine, inputs)

    engine.forward = fails  # type: ignore[method-assign]
    meter = attach(engine)

    def evaluate(step: int) -> None:
        engine.training = False
        with contextlib.suppress(MemoryError):
            engine.forward(torch.zeros(4, 2))
        engine.training = True

    measured = measure(engine, before=evaluate)
    assert measured.ok and measured is meter.outcome


def test_steps_that_fp16_skipped_are_not_measured(clock: Clock) -> None:
    engine = attached(clock)

    def overflow(step: int) -> None:
        engine.overflows = step <= 7 or step in (9, 12)
        engine.times_ms = (3.0, 5.0, 0.1) if engine.overflows else (3.0, 5.0, 2.0)

    measured = measure(engine, before=overflow)
    # Steps 8 and 10 are the first that count; 11, 13 and 14 are measured.
    assert engine.global_steps == 14
    assert measured.step_ms == pytest.approx((10, 10, 10))


def test_a_loss_that_is_never_finite_is_said_so(clock: Clock) -> None:
    engine = attached(clock)
    engine.overflows = True
    outcome = measure(engine, steps=1000)
    assert outcome.kind is OutcomeKind.DIVERGED and "overflowed in fp16" in outcome.message
    assert engine.global_steps == MAX_SKIPPED_STEPS + 1


def test_the_operation_is_long_enough_for_skipped_steps(clock: Clock) -> None:
    engine = attached(clock)

    def worst(step: int) -> None:
        engine.overflows = step <= MAX_SKIPPED_STEPS
        engine.times_ms = (3.0, 5.0, 2.0 if step % 2 else 90.0)

    assert train(engine, before=worst) is not None
    # Without steps that only an accelerator or a loader with workers needs.
    assert engine.global_steps == LONGEST - 2 * MAX_EXTRA_STEPS


# -- engines


def test_measures_the_first_engine_that_trains(clock: Clock) -> None:
    """Earlier engines may be reference models, with an optimizer or a dummy of one."""

    def make(optimizer: object = None) -> FakeEngine:
        engine = FakeEngine(clock)
        engine.basic_optimizer = optimizer
        return engine

    meter = watched(make)
    without = initialize()
    assert "without calling deepspeed.initialize" in meter.at_its_end().message
    reference, trained, second = (initialize(optimizer="adam") for _ in range(3))
    assert "after 0 optimizer steps" in meter.at_its_end().message
    inputs = torch.zeros(4)
    for engine in (without, reference):
        with torch.no_grad():
            engine.forward(inputs)
    reference.training = False
    reference.forward(inputs)
    trained.forward(inputs)
    reference.forward(inputs)
    assert train(second, steps=30) is None
    trained.backward(inputs)
    trained.step()
    assert "after 1 optimizer step of the engine that trains first" in meter.at_its_end().message
    told = measure(trained)
    assert metrics_of(told).latency == pytest.approx(10)
    assert told.warnings == (SEVERAL_ENGINES,)


def test_a_short_training_before_the_real_one_ends_the_trial(clock: Clock) -> None:
    def make(optimizer: object) -> FakeEngine:
        engine = FakeEngine(clock)
        engine.basic_optimizer = optimizer
        return engine

    watched(make)
    first, second = (initialize(optimizer="adam") for _ in range(2))
    assert train(first, steps=1) is None
    told = measure(second)
    assert told.kind is OutcomeKind.INVALID
    assert "stopped after 1 optimizer step, and another engine trains on" in told.message


def test_a_script_may_leave_out_the_engines_forward(clock: Clock) -> None:
    engine = attached(clock)

    def loop() -> None:
        for _ in range(30):
            engine.backward(torch.zeros(()))
            engine.step()

    told = measured_by(loop)
    assert metrics_of(told).latency == pytest.approx(7)
    assert told.warnings == (UNSEEN,)


@pytest.mark.parametrize(
    ("gas", "batches", "cheap", "steps", "warnings"),
    [
        # Eight batches last for four steps; those of the fifth may be loaded meanwhile.
        (2, 8, 5, 5, ()),
        # For a minute at most.
        (1, 64, 0, 65, ()),
        (1, 64, -1, 3, (STORE_NOT_USED_UP.format(batches=64),)),
    ],
)
def test_what_loaders_have_in_store_is_used_up_first(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    gas: int,
    batches: int,
    cheap: int,
    steps: int,
    warnings: tuple[str, ...],
) -> None:
    monkeypatch.setattr("dsat.in_trial.loaders.batches_in_store", batches)
    engine = FakeEngine(clock, gas=gas)
    meter = attach(engine, gas=gas)
    of_step = (10_000, 10_000, 5_000) if cheap < 0 else (3, 5, 2)

    def before(step: int) -> None:
        engine.times_ms = (1, 1, 0) if step <= cheap else of_step

    measured = measure(engine, before=before)
    assert measured.warnings == warnings
    assert metrics_of(measured).latency == pytest.approx(sum(of_step[:2]) * gas + of_step[2])
    assert meter.steps == steps + 3


def test_a_script_that_calls_its_model_itself_is_counted_from_the_second_step(
    clock: Clock,
) -> None:
    """The meter notices such calls only during the first step."""
    engine = FakeEngine(clock)
    engine.module.register_forward_hook(lambda *_: clock.advance(30))
    attach(engine, start_step=1, end_step=1, max_steps=3)

    def loop() -> None:
        for _ in range(9):
            engine.backward(engine.module(torch.zeros(4, 1)))
            engine.step()

    told = measured_by(loop)
    assert told.warnings == ()
    assert told.step_ms[0] == pytest.approx(37)
