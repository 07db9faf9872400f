"""A script's own parallelism, pipelines and other numbers of ranks are refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.parallelism import DATA_ONLY, Parallelism
from testing.metered import Clock, FakeEngine, initialize, measure, told_by, watched

PipelineModule = type("PipelineModule", (), {})  # as DeepSpeed's is called
Mine = type("Mine", (PipelineModule,), {})


@pytest.fixture(autouse=True)
def four_ranks(ranks: Callable[[int], None]) -> None:
    ranks(4)


def told_of(clock: Clock, arguments: dict[str, Any], **settings: Any) -> Outcome:
    """Return the outcome of a script that passes these arguments to `deepspeed.initialize`."""
    engine: Any = FakeEngine(clock)
    engine.mp_world_size = 2
    watched(lambda **_: engine, **{"slots": 4, "parallelism": Parallelism(2, 1), **settings})

    return told_by(lambda: initialize(**arguments)) or measure(engine)


@pytest.mark.parametrize(
    ("arguments", "slots", "problem"),
    [
        ({"mpu": SimpleNamespace(get_data_parallel_world_size=lambda: 1)}, 4, "its own mpu"),
        ({"model": Mine()}, 4, "was given a PipelineModule"),
        ({}, 8, "4 ranks on 8 devices"),
        ({}, 1, "4 ranks on 1 device."),
        ({"model": torch.nn.Linear(1, 1)}, 4, ""),
        ({"mpu": None, "mesh_param": None}, 4, ""),
        ({"mpu": SimpleNamespace(get_data_parallel_world_size=lambda: 4)}, 4, ""),
        ({"mpu": SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)}, 4, ""),
        ({"mesh_param": (2, 2)}, 4, ""),
    ],
)
def test_arguments(clock: Clock, arguments: dict[str, Any], slots: int, problem: str) -> None:
    told = told_of(clock, arguments, slots=slots)
    assert (told.kind is OutcomeKind.INVALID) is bool(problem)
    assert problem in told.message


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        ({"micro_batch": 8}, "train_micro_batch_size_per_gpu is 4, not 8"),
        ({"gas": 2}, "gradient_accumulation_steps is 1, not 2"),
        ({"stage": 3}, "zero_optimization.stage is 1, not 3"),
        ({"parallelism": DATA_ONLY}, "autotp_size is 2 in the script's engine, not 1"),
        ({"parallelism": Parallelism(2, 2)}, "sequence_parallel_size is 1 in"),
    ],
)
def test_an_engine_with_other_settings_is_refused(
    clock: Clock, expected: dict[str, Any], problem: str
) -> None:
    told = told_of(clock, {}, **expected)
    assert told.kind is OutcomeKind.INVALID and problem in told.message
