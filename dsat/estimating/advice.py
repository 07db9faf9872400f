"""The strategy to train with, chosen by the search's speed model from those that fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsat.command.ds_config import BATCH_KEYS
from dsat.estimating.line import Line
from dsat.memory import host
from dsat.memory.facts import ModelFacts
from dsat.search import gpus
from dsat.search.gpus import GpuModel
from dsat.search.step_time import FACTORS, Job, Terms, hardware_of, work
from dsat.values import format as fmt
from dsat.values import parallelism
from dsat.values.zero_strategy import Strategy

_STEP_TOKENS = 16_384  # of each device, in the compared steps
_SIZE_TOLERANCE = 2**30  # bytes between the given memory and a GPU's
# If several strategies are within this factor of the fastest, advise the first in the usual order.
_CLOSE = 1.1


@dataclass(frozen=True)
class Advice:
    """The advised strategy for a number of devices with the same memory.

    Attributes:
        gpu: type of GPU whose speed is predicted; empty if speeds are unknown. The strategy is then
            the first that practitioners try.
        needed: bytes that a device needs for a micro batch of 1.
        other: strategy to compare with: the fastest or, if that is advised, the first that
            practitioners try; None if these are the same, or if speeds are unknown.
        speedup: predicted speed, relative to `other`.
    """

    slots: int
    memory_bytes: int
    gpu: str
    strategy: Strategy
    needed: int
    other: Strategy | None = None
    speedup: float = 1.0

    def to_json(self) -> dict[str, Any]:
        other = None if self.other is None else self.other.name
        return {**vars(self), "strategy": self.strategy.name, "other": other}

    def __str__(self) -> str:
        size, need = fmt.memory(self.memory_bytes), fmt.memory(self.needed)
        if not self.gpu:
            return f"{size}: {self.strategy.label} ({need}), the first to try (speeds are unknown)"
        text = f"{size} ({self.gpu}): {self.strategy.label} ({need})"
        if self.other is None:
            return text
        if self.speedup < _CLOSE:
            return f"{text}; {self.other.label} is predicted to be about as fast"
        return f"{text}, predicted {self.speedup:.1f}x as fast as {self.other.label}"


def advise(
    facts: ModelFacts, config: Mapping[str, Any], lines: Sequence[Line], length: int | None
) -> list[Advice]:
    """Return advice for each number of devices and each memory size that holds the model.

    Args:
        lines: one for each strategy and number of devices, in the order that practitioners try.
        length: tokens of a sample; None if samples are not sequences, so that speed is unknown.
    """
    advice = []
    for slots in dict.fromkeys(line.slots for line in lines):
        for size in lines[0].largest:
            fitting = [line for line in lines if line.slots == slots and line.largest[size]]
            if fitting:
                advice.append(_best(facts, config, fitting, size, length))
    return advice


def _best(
    facts: ModelFacts,
    config: Mapping[str, Any],
    fitting: Sequence[Line],
    size: int,
    length: int | None,
) -> Advice:
    first, gpu = fitting[0], _usual_gpu(size)
    if gpu is None or length is None:
        return Advice(first.slots, size, "", first.strategy, first.needed)
    times = {line: _sample_s(facts, config, line, size, length, gpu) for line in fitting}
    fastest = min(fitting, key=times.__getitem__)
    best = next(line for line in fitting if times[line] <= _CLOSE * times[fastest])
    advice = Advice(best.slots, size, gpu.name, best.strategy, best.needed)
    other = fastest if best is not fastest else first
    if other is best:
        return advice
    return replace(advice, other=other.strategy, speedup=times[other] / times[best])


def _usual_gpu(size: int) -> GpuModel | None:
    """Return the fastest type of GPU with about `size` bytes of memory; None if there is none."""
    similar = [c for c in gpus.table().values() if abs(c.memory_bytes - size) < _SIZE_TOLERANCE]
    return max(similar, key=lambda gpu: gpu.peak(2), default=None)


def _sample_s(
    facts: ModelFacts, config: Mapping[str, Any], line: Line, size: int, length: int, gpu: GpuModel
) -> float:
    """Predict the seconds per sample, in steps of about the same size for all strategies."""
    sizes = (config.get(key) for key in BATCH_KEYS[1:])
    samples = math.prod(number for number in sizes if isinstance(number, int))
    batch = max(samples, math.ceil(_STEP_TOKENS / length))
    micro_batch = min(line.largest[size], batch)
    gas = math.ceil(batch / micro_batch)
    job = Job(
        params=facts.num_params,
        trainable=facts.trainable_params,
        param_bytes=facts.param_bytes,
        flops_per_sample=length * (4 * facts.num_params + 2 * facts.trainable_params),
        slots=line.slots,
        slots_per_host=host.PER_HOST if line.slots > host.PER_HOST else 0,
        parallelism=parallelism.read_parallelism(config),
        hardware=hardware_of(gpu, facts.param_bytes),
    )
    terms = Terms(
        job.hardware,
        work(job, line.strategy, {})[None, :],
        np.array([float(micro_batch)]),
        np.array([float(gas)]),
        np.ones(1),
    )
    step_s = terms.seconds(np.zeros(len(FACTORS)))
    return float(step_s[0]) / (micro_batch * gas)
