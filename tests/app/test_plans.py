"""Switches and accumulation in the plan of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsat.app.plans import of_launcher, plan_of
from dsat.errors import UserInputError
from dsat.inputs import experiment
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.placement import Launch
from dsat.inputs.settings import Settings
from dsat.inputs.switches import parse
from dsat.space.plan import Plan

BASE = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}


def plan(*words: str, config: dict[str, Any] = BASE, **settings: Any) -> Plan:
    user = experiment.of_command(["python3", "train.py"], "train", Path(), config, "it")
    listed = dict(map(parse, words))
    own = ["--workers", "2", "--fused"]
    made = Settings(method="random", listed_switches=listed, **settings)
    return plan_of(made, user, 1, args=own, switches={}, offload_helps=False)


def test_listed_switches_begin_with_the_scripts_own_values() -> None:
    words = ("--workers=0,2,4", "--fused", "--other", "ENV:A=1", "dataloader_num_workers=0,1")
    assert plan(*words, tune=("ENV:NCCL_BUFFSIZE",)).listed_switches == {
        "ENV:NCCL_BUFFSIZE": (None, "8388608", "16777216"),
        "--workers": ("2", "0", "4"),
        "--fused": (True, False),
        "--other": (False, True),
        "ENV:A": (None, "1"),
        "dataloader_num_workers": (None, 0, 1),
    }


def test_cores_can_be_bound_by_deepspeeds_launcher_alone() -> None:
    for launch, expected in (
        (Launch(passes_local_rank=True), {"bind_cores_to_rank": (False, True)}),
        (Launch(passes_local_rank=True, binds_cores=True), {}),
        (Launch(), {}),
    ):
        assert of_launcher(Entrypoint(script="train.py", launch=launch)) == expected


def test_accumulation_that_the_script_manages_is_left_to_it() -> None:
    config = {**BASE, "managed_gradient_accumulation": False}
    assert plan(config=config).train_batch_size is None
    for asked in ({"train_batch_size": "own"}, {"max_train_batch_size": 64}):
        with pytest.raises(UserInputError, match="leaves gradient accumulation to the script"):
            plan(config=config, **asked)
