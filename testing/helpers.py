"""Outcomes, plans and recorded starts that several test modules use."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.command.recorded_start import RankStart
from dsat.space.plan import Plan
from dsat.values.objective import METRICS
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple


def ran(value: float = 1.0, metric: str = "throughput") -> Outcome:
    """Return a successful outcome in which `metric` is `value` and all other metrics are very
    bad."""
    slow = {name: 1e9 for name, each in METRICS.items() if not each.larger_is_better}
    numbers = {"throughput": -1e9, "FLOPS_per_gpu": -1e9, **slow, metric: value}
    return Outcome(OutcomeKind.OK, metrics=Metrics(**numbers, num_steps=5, ci95=0.01, accidents=0))


def failed(kind: OutcomeKind | str, message: str = "") -> Outcome:
    return Outcome(OutcomeKind(kind), message=message)


def weightless(ceiling: int) -> ModelProfile:
    """Return the profile of a model without parameters, of which exactly `ceiling` samples fit.

    Its memory is activations only.
    """
    return ModelProfile(
        num_params=0,
        trainable_params=0,
        param_bytes=2,
        activation_bytes_per_sample=10,
        flops_per_sample=1e9,
        slot_memory_bytes=10 * ceiling,
    )


def plan_of(method: str = "binary", **changes: Any) -> Plan:
    plan = Plan(
        method=method,
        metric="throughput",
        max_trials=20,
        zero_stages=(1, 2, 3),
        seed=7,
        slots_per_trial=1,
        base_config={"optimizer": {"type": "Adam"}, "gradient_accumulation_steps": 1},
        own_batch=BatchTriple(4, 4, 1),
    )
    return replace(plan, **changes)


def starts_of(
    folder: Path, variables: Sequence[Mapping[str, str]], config: Mapping[str, Any] | None = None
) -> list[RankStart]:
    """Return the recorded starts of `train.py` in a folder, one rank for each mapping of
    variables."""
    return [
        RankStart(
            rank=number,
            size=len(variables),
            forked=False,
            executable=sys.executable,
            prefix=sys.prefix,
            version=tuple(sys.version_info[:2]),
            command=(sys.executable, "train.py"),
            cwd=str(folder),
            env=its,
            config=config,
        )
        for number, its in enumerate(variables)
    ]
