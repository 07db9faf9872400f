"""Losses of healthy trainings of all kinds: none is called diverged, or different from the own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch

from dsat.errors import Diverged
from dsat.in_trial.losses import LossWatch
from dsat.tuning import same_training
from dsat.values.outcome import TrainingCurve
from testing.soak import Tally

_STEPS = 24
_LARGEST_ERROR = {"fp32": 2e-6, "bf16": 2e-3}  # of the terms of which a loss is the sum
Kind = Callable[[random.Random, int], tuple[float, float]]


def attack(seed: int, count: int) -> Tally:
    """Run trainings whose losses differ from the own by the rounding of their terms only."""
    rng, tally = random.Random(seed), Tally()
    while tally.tried < count:
        name, kind = rng.choice(tuple(_KINDS.items()))
        precision = rng.choice(tuple(_LARGEST_ERROR))
        exact = [kind(rng, step) for step in range(_STEPS)]
        runs = [_rounded(rng, exact, _LARGEST_ERROR[precision]) for _ in range(3)]
        if rng.random() < 0.5:  # a script that computes the same each time
            runs[1] = runs[0]
        finding = ""
        try:
            curves = [_watched(losses) for losses in runs]
            found = same_training.compare(
                curves[:2], curves[2], precision=precision, same_batch=True
            )
            if found.differs:
                finding = found.reason
        except Diverged as error:
            finding = f"diverged: {error}"
        where = f"{seed}/{tally.tried}: {name}, {precision}: "
        tally.note(name, finding and where + finding)
    return tally


def _rounded(rng: random.Random, exact: list[tuple[float, float]], error: float) -> list[float]:
    return [loss + terms * error * rng.uniform(-1, 1) for loss, terms in exact]


def _watched(losses: list[float]) -> TrainingCurve:
    watch = LossWatch(_Engine(), lambda: True)
    for loss in losses:
        watch.of_engine(torch.tensor(loss), scaled_by_script=False)
        watch.end_step(micro_steps=1, applied=True)
        watch.read(lambda values: values)
    return watch.curve()


class _Engine:
    module, device = torch.nn.Linear(1, 1), "cpu"

    def gradient_accumulation_steps(self) -> int:
        return 1


def _language_model(rng: random.Random, step: int) -> tuple[float, float]:
    loss = 11.0 * math.exp(-step / 20) + rng.uniform(0, 0.3)
    return loss, loss


def _spikes(rng: random.Random, step: int) -> tuple[float, float]:
    loss = rng.uniform(1, 3) * (rng.choice((100.0, 1e4)) if rng.random() < 0.1 else 1.0)
    return loss, loss


def _small(rng: random.Random, step: int) -> tuple[float, float]:
    loss = 1e-4 * rng.uniform(0.5, 2)
    return loss, loss


def _grows(rng: random.Random, step: int) -> tuple[float, float]:
    loss = 1e-3 * 1.5**step
    return loss, loss


def _policy_gradient(rng: random.Random, step: int) -> tuple[float, float]:
    return rng.gauss(0, 0.5), 1.0


def _grpo(rng: random.Random, step: int) -> tuple[float, float]:
    """Return 0 in the first step, where old and new policy are the same, then next to nothing."""
    return (0.0 if step == 0 or rng.random() < 0.3 else rng.uniform(0, 1e-4)), 1.0


def _grpo_without_kl(rng: random.Random, step: int) -> tuple[float, float]:
    return rng.choice((0.0, 1.0, 1e-6, -1e-6)), 1.0


_KINDS: dict[str, Kind] = {
    "language model": _language_model,
    "spikes": _spikes,
    "small losses": _small,
    "grows": _grows,
    "policy gradient": _policy_gradient,
    "GRPO": _grpo,
    "GRPO without KL": _grpo_without_kl,
}
