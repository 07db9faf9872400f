"""Parallelism of a script's own, pipelines and other numbers of ranks are refused by name."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsat.errors import InvalidTrial
from dsat.in_trial.conformance import check_arguments, check_engine
from dsat.values.parallelism import DATA_ONLY, Parallelism
from testing.metered import SPEC, Clock, FakeEngine

PipelineModule = type("PipelineModule", (), {})  # as DeepSpeed's is called
Mine = type("Mine", (PipelineModule,), {})


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)


@pytest.mark.parametrize(
    ("arguments", "slots", "problem"),
    [
        ({"mpu": SimpleNamespace(get_data_parallel_world_size=lambda: 1)}, 4, "an mpu of its own"),
        ({"model": Mine()}, 4, "was given a PipelineModule"),
        ({}, 8, r"4 ranks on 8 slots: .*resources\.slots_per_trial"),
    ],
)
def test_refused(arguments: dict[str, Any], slots: int, problem: str) -> None:
    with pytest.raises(InvalidTrial, match=problem):
        check_arguments(arguments, slots)


@pytest.mark.parametrize(
    "arguments",
    [
        {"model": torch.nn.Linear(1, 1)},
        {"mpu": None, "mesh_param": None},
        {"mpu": SimpleNamespace(get_data_parallel_world_size=lambda: 4)},
        {"mpu": SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)},
        {"mesh_param": (2, 2)},
    ],
)
def test_accepted(arguments: dict[str, Any]) -> None:
    check_arguments(arguments, 4)
    check_arguments(arguments, 0)


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        ({}, ""),
        ({"micro_batch": 8}, "train_micro_batch_size_per_gpu is 4, not 8"),
        ({"gas": 2}, "gradient_accumulation_steps is 1, not 2"),
        ({"stage": 3}, "zero_optimization.stage is 1, not 3"),
        ({"parallelism": DATA_ONLY}, "autotp_size is 2 in the script's engine, not 1"),
        (
            {"parallelism": Parallelism(2, 2)},
            r"sequence_parallel_size is 1 in .*, not 2\. A script takes it from",
        ),
    ],
)
def test_an_engine_with_other_settings_is_refused(expected: dict[str, Any], problem: str) -> None:
    engine: Any = FakeEngine(Clock())
    engine.mp_world_size = 2
    spec = replace(SPEC, **{"parallelism": Parallelism(2, 1), **expected})
    with pytest.raises(InvalidTrial, match=problem) if problem else nullcontext():
        check_engine(engine, spec)
