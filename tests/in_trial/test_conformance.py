"""Parallelism of a script's own, pipelines and other numbers of ranks are refused by name."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsat.errors import InvalidTrial
from dsat.in_trial.conformance import check_arguments, check_engine
from dsat.values.parallelism import Parallelism


class PipelineModule:
    """A class of the name that DeepSpeed's has."""


class Mine(PipelineModule):
    pass


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
@pytest.mark.parametrize("slots", [0, 4])
def test_accepted(arguments: dict[str, Any], slots: int) -> None:
    check_arguments(arguments, slots)


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        (Parallelism(2, 1), ""),
        (Parallelism(1, 1), r"autotp_size is 2 in the script's engine, not 1"),
        (Parallelism(2, 2), r"sequence_parallel_size is 1 in .*, not 2\. A script takes it from"),
    ],
)
def test_an_engine_with_other_parallelism_is_refused(expected: Parallelism, problem: str) -> None:
    engine = SimpleNamespace(
        train_micro_batch_size_per_gpu=lambda: 2,
        gradient_accumulation_steps=lambda: 1,
        zero_optimization_stage=lambda: 1,
        mp_world_size=2,
    )
    with pytest.raises(InvalidTrial, match=problem) if problem else nullcontext():
        check_engine(engine, micro_batch=2, gas=1, stage=1, parallelism=expected)
