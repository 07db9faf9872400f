"""Switches and accumulation in the plan of a search."""

from __future__ import annotations

import pytest

from dsat.errors import UserInputError
from dsat.tuning import plans
from dsat.tuning.settings import Settings
from dsat.values.objective import METRICS, Metric
from testing.scenarios import User
from testing.started import Told


def dry(user: User, *options: str) -> Told:
    words = ("random", "--ds-config", "ds.json", "--dry-run", "--json", *options)
    return user.types(*words, "--", "train.py", "--workers", 2, "--fused")


def test_listed_switches_begin_with_the_scripts_own_values(user: User) -> None:
    words = "--workers=0,2,4 --fused --other ENV:A=1 ENV:NCCL_ALGO=Ring,Tree optim=adamw_torch "
    words += "dataloader_num_workers=0,1 group_by_length=true,false TrainingArguments.seed=1,2 "
    words += "gradient_checkpointing=false,every_2_layers"
    options = [f"--switch={word}" for word in words.split()]
    told = dry(user, *options, "--tune", "ENV:NCCL_BUFFSIZE")
    assert told.json["plan"]["listed_switches"] == {
        "ENV:NCCL_BUFFSIZE": [None, "8388608", "16777216"],
        "--workers": ["2", "0", "4"],
        "--fused": [True, False],
        "--other": [False, True],
        "ENV:A": [None, "1"],
        "dataloader_num_workers": [None, 0, 1],
        "ENV:NCCL_ALGO": [None, "Ring", "Tree"],
        "optim": [None, "adamw_torch"],
        "TrainingArguments.seed": [None, 1, 2],
        "TrainingArguments.group_by_length": [None, True, False],
        "gradient_checkpointing": [None, False, "every_2_layers"],
    }


@pytest.mark.parametrize(
    ("launcher", "listed"),
    [
        ("deepspeed --num_gpus 1", {"bind_cores_to_rank": [False, True]}),
        ("deepspeed --num_gpus 1 --bind_cores_to_rank", {}),
        ("torchrun --nproc_per_node 1", {}),
    ],
)
def test_cores_can_be_bound_by_deepspeeds_launcher_alone(
    user: User, launcher: str, listed: dict[str, list[bool]]
) -> None:
    words = [*launcher.split(), "train.py", "--deepspeed_config", "ds.json"]
    told = user.types("random", "--dry-run", "--json", *words)
    assert told.json["plan"]["listed_switches"] == listed


def test_accumulation_that_the_script_manages_is_left_to_it(user: User) -> None:
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    user.has({**sizes, "managed_gradient_accumulation": False})
    assert dry(user).json["plan"]["train_batch_size"] is None
    for option, value in (("--train-batch-size", "own"), ("--max-train-batch-size", "64")):
        told = dry(user, option, value)
        assert told.status == 2 and "gradient accumulation" in told.err


def test_the_model_search_takes_no_metric_that_it_cannot_predict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(METRICS, "num_steps", Metric("steps", of_time=False))
    plans.check(Settings(method="random", metric="num_steps"))
    with pytest.raises(UserInputError) as caught:
        plans.check(Settings(method="model", metric="num_steps"))
    assert caught.value.where == "--metric"
