"""Ranks that share samples are told so, and not that the batch sizes contradict each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsat.errors import InvalidTrial
from dsat.in_trial.conformance import (
    check_engine,
    refuse_other_ranks,
    refuse_pipeline,
    refuse_shared_samples,
)


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)


def engine(**more: Any) -> Any:
    return SimpleNamespace(
        train_micro_batch_size_per_gpu=lambda: 2,
        gradient_accumulation_steps=lambda: 1,
        zero_optimization_stage=lambda: 1,
        **more,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mpu": SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)}, "2 slots .* mpu"),
        ({"mpu": SimpleNamespace(get_data_parallel_world_size=lambda: 1)}, "4 slots .* mpu"),
        ({"mesh_param": (2, 2)}, "2 slots share each sample by the mesh_param"),
    ],
)
def test_a_script_that_splits_samples_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidTrial, match=said):
        refuse_shared_samples(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"mpu": None, "mesh_param": None},
        {"mpu": SimpleNamespace(get_data_parallel_world_size=lambda: 4)},
        {"mpu": SimpleNamespace(get_sequence_parallel_world_size=lambda: 1)},
        {"mesh_param": (4, 1)},
    ],
)
def test_others_are_not(arguments: dict[str, Any]) -> None:
    refuse_shared_samples(arguments)


def test_a_pipeline_is_refused_before_deepspeed_sees_it() -> None:
    class PipelineModule:
        pass

    class Mine(PipelineModule):
        pass

    refuse_pipeline({"model": torch.nn.Linear(1, 1)})
    refuse_pipeline({})
    with pytest.raises(InvalidTrial, match="was given a PipelineModule"):
        refuse_pipeline({"model": Mine()})


def test_fewer_ranks_than_slots_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    refuse_other_ranks(4)
    refuse_other_ranks(0)
    with pytest.raises(InvalidTrial, match=r"4 ranks on 8 slots: .*resources\.slots_per_trial"):
        refuse_other_ranks(8)


def test_an_engine_with_fewer_data_parallel_ranks_is_refused() -> None:
    check_engine(engine(dp_world_size=4), micro_batch=2, gas=1, stage=1)
    check_engine(engine(dp_world_size=None), micro_batch=2, gas=1, stage=1)
    with pytest.raises(InvalidTrial, match="2 slots share each sample"):
        check_engine(engine(dp_world_size=2), micro_batch=2, gas=1, stage=1)
