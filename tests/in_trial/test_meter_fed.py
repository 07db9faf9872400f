"""The meter counts the samples and tokens that the script feeds."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dsat.in_trial.batches import DROPPED
from dsat.in_trial.measurement import SHORT_BATCHES
from dsat.values.outcome import Outcome, OutcomeKind, SequenceLengths, StepFacts
from testing.metered import (
    OPTIONS,
    Clock,
    FakeEngine,
    attach,
    attached,
    facts_of,
    measured_by,
    metrics_of,
    train,
)

# -- samples that were fed


def feed(engine: FakeEngine, rows: Callable[[int], int], *, per_step: int = 1) -> Outcome:
    """Train with batches of `rows` rows, and make an optimizer step after every `per_step`
    batches."""

    def loop() -> None:
        for batch in range(1000):
            engine.backward(engine.forward(torch.zeros(rows(batch), 3)).sum())
            if (batch + 1) % per_step == 0:
                engine.step()

    return measured_by(loop)


@pytest.mark.parametrize("every", [2, 5])
def test_steps_that_are_not_full_are_not_measured(clock: Clock, every: int) -> None:
    """The last batch of an epoch is short, and quick."""
    engine = attached(clock)

    def rows(batch: int) -> int:
        short = batch % every == every - 1
        engine.times_ms = (1.0, 1.0, 1.0) if short else (3.0, 5.0, 2.0)
        return 1 if short else 4

    measured = feed(engine, rows)
    assert metrics_of(measured).latency == pytest.approx(10)
    assert metrics_of(measured).throughput == pytest.approx(400)
    assert SHORT_BATCHES in measured.warnings


def test_too_few_data_for_a_step_are_told(clock: Clock) -> None:
    """As with 9 samples in batches of 4, three of them a step."""
    told = feed(attached(clock, gas=3), lambda batch: 1 if batch % 3 == 2 else 4)
    assert told.kind is OutcomeKind.INVALID and told.smaller_may_run
    assert "none of 3 optimizer steps was full" in told.message


@pytest.mark.parametrize(
    ("gas", "rows"),
    [
        (1, [16, 15, 16, 16, 14, 15, 16, 16, 15]),
        (4, [16, 15, 16, 16, 14, 15, 16, 16, 15]),  # no step is full
        (1, [15, 16, 15, 15, 14, 15, 15]),  # the first call is not full
        (4, [15, 14, 15, 15, 12]),  # no call is full
    ],
)
def test_a_loader_that_drops_samples_is_measured_by_what_it_feeds(
    clock: Clock, gas: int, rows: list[int]
) -> None:
    engine = FakeEngine(clock, 16, gas)
    attach(engine, micro_batch=16, gas=gas)
    measured = feed(engine, lambda batch: rows[batch % len(rows)])
    metrics = metrics_of(measured)
    first, count = OPTIONS.start_step - 1, metrics.num_steps
    fed = [rows[i % len(rows)] for i in range(first * gas, (first + count) * gas)]
    assert metrics.throughput == pytest.approx(sum(fed) / (count * (8 * gas + 2)) * 1e3)
    assert measured.warnings == (DROPPED,)


@pytest.mark.parametrize("sets_boundary", [False, True])
def test_accumulation_of_the_scripts_own_is_measured_by_real_steps(
    clock: Clock, sets_boundary: bool
) -> None:
    k = 4
    engine = attached(clock)
    if sets_boundary:  # as `set_gradient_accumulation_boundary` does
        engine._is_gradient_accumulation_boundary = False  # type: ignore[attr-defined]
    measured = feed(engine, lambda batch: 4, per_step=k)
    assert metrics_of(measured).latency == pytest.approx(8 * k + 2)
    assert metrics_of(measured).throughput == pytest.approx(4 * k / (8 * k + 2) * 1e3)
    [warning] = measured.warnings
    assert f"{k} times as many micro batches" in warning
    assert ("set_gradient_accumulation_boundary" in warning) is sets_boundary


@pytest.mark.parametrize(
    ("gas", "own_gas", "own", "refusal"),
    [
        (1, 4, 4, "it is 1 instead of your 4"),
        (8, 4, 4, "steps was full"),  # perhaps the end of an epoch
        (4, 4, 4, ""),
        (1, 2, 8, ""),  # always four times as many
        (1, 1, 4, ""),
    ],
)
def test_accumulation_that_is_a_constant_of_the_script_is_refused(
    clock: Clock, gas: int, own_gas: int, own: int, refusal: str
) -> None:
    engine = attached(clock, gas=gas, own_steps=StepFacts(own_gas, own))

    def loop() -> None:
        for batch in range(1000):
            engine.backward(engine.forward(torch.zeros(4, 3)).sum())
            if batch % 4 == 3:
                engine.micro_steps = -1  # as set_gradient_accumulation_boundary has it
                engine.step()

    told = measured_by(loop)
    if refusal:
        assert told.kind is OutcomeKind.INVALID and refusal in told.message
        assert told.smaller_may_run == (gas > 4)
    else:
        assert facts_of(told) == StepFacts(gas, 4)


def test_one_step_of_more_micro_batches_is_no_habit(clock: Clock) -> None:
    """A Trainer adds the rest of an epoch of unknown length to the next step."""
    engine = attached(clock, gas=2)

    def loop() -> None:
        for step in range(100):
            for _ in range(3 if step == 4 else 2):
                engine.backward(engine.forward(torch.zeros(4, 3)))
            engine.micro_steps += 1
            engine.step()

    assert not any("times as many" in text for text in measured_by(loop).warnings)


def test_a_pair_of_calls_for_one_loss_is_one_micro_step(clock: Clock) -> None:
    """For example, one call for chosen and one for rejected answers."""
    engine = attached(clock)

    def loop() -> None:
        for _ in range(100):
            both = [engine.forward(torch.zeros(4, 3)) for _ in range(2)]
            engine.backward((both[0] - both[1]).sum())
            engine.step()

    measured = measured_by(loop)
    assert metrics_of(measured).throughput == pytest.approx(4 / 0.013)
    assert measured.warnings == ()


class Timed(nn.Module):
    """A model whose forward pass takes 3 ms."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.inner = nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.clock.advance(3.0)
        found: torch.Tensor = self.inner(inputs)
        return found


@pytest.mark.parametrize("evaluates", [False, True])
def test_what_is_fed_to_the_model_itself_is_counted(clock: Clock, evaluates: bool) -> None:
    """Scripts for generative adversarial networks do this. Every third batch is short and quick."""
    engine = FakeEngine(clock)
    engine.module = Timed(clock)
    attach(engine)

    def loop() -> None:
        for batch in range(1000):
            rows = 1 if batch % 3 == 2 else 4
            engine.times_ms = (0.0, 5.0, 2.0) if rows == 4 else (0.0, 1.0, 1.0)
            engine.backward(engine.module(torch.zeros(rows, 3)).sum())
            if evaluates:
                with torch.no_grad():
                    engine.module(torch.zeros(77, 3))
            engine.step()

    outcome = measured_by(loop)
    metrics, latency = metrics_of(outcome), 13 if evaluates else 10
    assert metrics.latency == pytest.approx(latency)
    assert metrics.throughput == pytest.approx(4 / latency * 1e3)
    assert metrics.forward == pytest.approx(3)
    assert outcome.warnings == (SHORT_BATCHES,)


# -- tokens


def test_tokens_and_lengths_are_measured(clock: Clock, ranks: Callable[[int], None]) -> None:
    ranks(3)
    engine = FakeEngine(clock, gas=2)
    engine.module = nn.Linear(2, 2)
    attach(engine, gas=2, slots=3)
    measured = train(engine, inputs=torch.ones(4, 50, dtype=torch.long))
    assert metrics_of(measured).throughput == pytest.approx(3 * 8 / 0.018)
    assert metrics_of(measured).tokens_per_second == pytest.approx(3 * 8 * 50 / 0.018)
    assert measured is not None and measured.sequences == SequenceLengths(50, 50)


def varying(clock: Clock, length: Callable[[int], int]) -> Outcome:
    """Train with batches that take 0.1 ms per token of their length."""
    engine = FakeEngine(clock)
    engine.module = nn.Linear(2, 2)
    attach(engine)

    def loop() -> None:
        for step in range(1, 1000):
            engine.times_ms = (0.05 * length(step), 0.05 * length(step), 0.0)
            engine.backward(engine.forward(torch.ones(4, length(step), dtype=torch.long)))
            engine.step()

    return measured_by(loop)


def test_the_interval_is_as_wide_as_lengths_vary(clock: Clock) -> None:
    even = varying(clock, lambda step: 100)
    assert metrics_of(even).ci95 == pytest.approx(0)
    lengths = random.Random(0).choices(range(50, 151), k=1000)
    measured = varying(clock, lambda step: lengths[step])
    metrics = metrics_of(measured)
    assert metrics.num_steps == OPTIONS.max_steps and metrics.ci95 > 0.1
    assert metrics.tokens_per_second == pytest.approx(4 / 0.0001)
    fed = lengths[3 : 3 + metrics.num_steps]
    assert metrics.throughput == pytest.approx(4 * len(fed) / (0.0001 * sum(fed)))
    error = statistics.stdev(fed) / math.sqrt(len(fed)) / statistics.mean(fed)
    assert facts_of(measured).tokens_error == pytest.approx(error)
    seen = lengths[1 : 3 + metrics.num_steps]
    assert measured.sequences == SequenceLengths(min(seen), max(seen))


@pytest.mark.parametrize(
    ("tokens", "share", "is_accident"),
    [
        (1.0, 1.0, True),
        (10.0, 1.0, False),  # a long sequence is more work
        (1.0, 0.4, False),  # most of the time passed outside of the engine: waiting for data
        (1.0, 0.6, True),
        (1.04, 1.0, False),  # slightly longer than usual, but longer
    ],
)
def test_only_time_that_nothing_explains_is_an_accident_of_the_host(
    clock: Clock, tokens: float, share: float, is_accident: bool
) -> None:
    engine = FakeEngine(clock)
    engine.module = nn.Linear(2, 2)
    attach(engine)

    def loop() -> None:
        for step in range(1, 1000):
            length = int(98 * tokens) if step == 9 else 96 + 2 * (step % 3)
            ms = 100.0 if step == 9 else 10.0 + 0.4 * (step % 3)
            engine.times_ms = (share * ms, 0.0, 0.0)
            clock.advance((1 - share) * ms)
            engine.backward(engine.forward(torch.ones(4, length, dtype=torch.long)))
            engine.step()

    metrics = metrics_of(measured_by(loop))
    assert metrics.accidents == is_accident
    assert (metrics.latency > 11) is not is_accident
