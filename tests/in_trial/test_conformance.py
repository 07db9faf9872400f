"""Ranks that share samples, pipelines and other numbers of ranks are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsat.errors import InvalidTrial
from dsat.in_trial.conformance import check_arguments, check_engine


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
        ({"mpu": SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)}, 4, "2 slots .* mpu"),
        ({"mpu": SimpleNamespace(get_data_parallel_world_size=lambda: 1)}, 4, "4 slots .* mpu"),
        ({"mesh_param": (2, 2)}, 4, "2 slots share each sample by the mesh_param"),
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
        {"mpu": SimpleNamespace(get_sequence_parallel_world_size=lambda: 1)},
        {"mesh_param": (4, 1)},
    ],
)
@pytest.mark.parametrize("slots", [0, 4])
def test_accepted(arguments: dict[str, Any], slots: int) -> None:
    check_arguments(arguments, slots)


@pytest.mark.parametrize("ranks", [4, None, 2])
def test_an_engine_with_fewer_data_parallel_ranks_is_refused(ranks: int | None) -> None:
    engine = SimpleNamespace(
        train_micro_batch_size_per_gpu=lambda: 2,
        gradient_accumulation_steps=lambda: 1,
        zero_optimization_stage=lambda: 1,
        dp_world_size=ranks,
    )
    if ranks == 2:
        with pytest.raises(InvalidTrial, match="2 slots share each sample"):
            check_engine(engine, micro_batch=2, gas=1, stage=1)
    else:
        check_engine(engine, micro_batch=2, gas=1, stage=1)
