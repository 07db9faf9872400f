"""Optimizer steps of a measurement, combined over all ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dsat.in_trial.agreement import Ranks
from dsat.in_trial.clocks import Clock
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.step_recorder import StepMarks
from dsat.in_trial.steps import StepTimes, summarize


@dataclass(frozen=True)
class AgreedStep:
    """An optimizer step, combined over all ranks.

    Attributes:
        ms: milliseconds of the step, then of each of the `PHASES`; maxima over the ranks.
        samples, tokens: means over the ranks; tokens are NaN if unknown.
        data_ms: longest time that a rank waited for data loaders, outside of the phases.
        elements: number of tensor elements in the step's batches; the maximum over the ranks.
        is_short: whether any rank lacked samples or micro steps.
        evaluated: whether any rank called the model outside of training.
        micro_steps: maximum over the ranks; 0 if unknown.
    """

    number: int
    ms: Sequence[float]
    samples: float
    tokens: float
    data_ms: float
    elements: float
    is_short: bool
    compiled: bool
    evaluated: bool
    micro_steps: int


def agree(
    steps: Sequence[StepMarks], ranks: Ranks, clock: Clock, spec: MeterSpec
) -> list[AgreedStep]:
    """Combine the ranks' measurements of the same steps; a collective call."""
    rows = [
        [
            *marks.milliseconds(clock),
            float(sum(call.elements for call in marks.calls)),
            float(not marks.is_full(spec)),
            float(marks.compiled),
            float(marks.evaluated),
            float(marks.micro_steps),
        ]
        for marks in steps
    ]
    counts = ranks.mean([marks.samples(spec) for marks in steps] + [m.tokens() for m in steps])
    result = []
    for i, row in enumerate(ranks.slowest(rows)):
        *ms, data_ms, elements, short, compiled, evaluated, micro_steps = row
        flags = bool(short), bool(compiled), bool(evaluated), int(micro_steps)
        samples, tokens = counts[i], counts[len(steps) + i]
        result.append(AgreedStep(steps[i].number, ms, samples, tokens, data_ms, elements, *flags))
    return result


def usual_micro_steps(steps: Sequence[AgreedStep]) -> int:
    """Return the most frequent number of micro batches in a full step; 0 if unknown."""
    return statistics.mode(step.micro_steps for step in steps)


def tokens_error(steps: Sequence[AgreedStep]) -> float | None:
    """Return the relative standard error of the tokens per sample; None if unknown."""
    count = len(steps)
    tokens = sum(step.tokens for step in steps)
    if count < 2 or math.isnan(tokens) or not tokens:
        return None
    ratio = tokens / sum(step.samples for step in steps)
    squares = sum((step.tokens - ratio * step.samples) ** 2 for step in steps)
    return math.sqrt(squares * count / (count - 1)) / tokens


def times_of(steps: Sequence[AgreedStep]) -> StepTimes:
    """Return statistics of the step times.

    A long step may be a delay by the host if it spent most of its time in its phases and had no
    more data than usual. Otherwise, waiting for data or longer sequences may be the cause.
    """
    median = statistics.median(step.elements for step in steps)
    may_be_accident = [
        sum(step.ms[1:]) > 0.5 * step.ms[0] and step.elements <= median for step in steps
    ]
    return summarize([step.ms[0] for step in steps], may_be_accident)
