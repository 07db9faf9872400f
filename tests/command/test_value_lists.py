"""Lists of values in a DeepSpeed configuration, which become the search space."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testing.scenarios import User
from tests.command import plans
from tests.command.plans import Reader

MICRO, GAS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def zero(**section: Any) -> dict[str, Any]:
    return {"zero_optimization": section}


PINNED = {"device": "cpu", "pin_memory": True, "ratio": 1.0}
CHOSEN = {"type": "categorical", "vals": [False, True]}


@pytest.mark.parametrize(
    ("config", "base", "listed"),
    [
        (zero(stage=2, overlap_comm=True), zero(stage=2, overlap_comm=True), {}),
        ({"zero_optimization": None}, {"zero_optimization": None}, {}),
        (zero(stage=[2.0, 3]), zero(stage=2), {"stage": [2, 3]}),
        (zero(stage=[3, "all"]), zero(stage=3), {"stage": [3, 0, 1, 2]}),
        (zero(stage="all"), zero(stage=0), {"stage": [0, 1, 2, 3]}),
        ({"zero_optimization": "all"}, zero(stage=0), {"stage": [0, 1, 2, 3]}),
        ({MICRO: [4.0, 1, 4], GAS: [2]}, {MICRO: 4, GAS: 2}, {MICRO: [1, 4], GAS: [2]}),
        (
            {MICRO: {"type": "categorical", "vals": [2, 4]}, **zero(overlap_comm=CHOSEN)},
            {MICRO: 2, **zero(overlap_comm=False)},
            {MICRO: [2, 4], "overlap_comm": [False, True]},
        ),
        (
            zero(reduce_bucket_size=["auto", 5e8], stage3_prefetch_bucket_size=[0, 1]),
            zero(reduce_bucket_size="auto", stage3_prefetch_bucket_size=0),
            {"reduce_bucket_size": ["auto", 500_000_000], "stage3_prefetch_bucket_size": [0, 1]},
        ),
        (
            zero(offload_optimizer=[None, {"device": "cpu"}]),
            zero(offload_optimizer=None),
            {"offload_optimizer": [None, {"device": "cpu"}]},
        ),
        (
            zero(offload_optimizer={**PINNED, "pin_memory": [True, False]}),
            zero(offload_optimizer=PINNED),
            {"offload_optimizer": [PINNED, {**PINNED, "pin_memory": False}]},
        ),
        (
            zero(
                offload_optimizer=[
                    {"device": "cpu", "ratio": [0.5, 1.0]},
                    {"device": "nvme", "nvme_path": "/x", "buffer_count": [4.0]},
                ]
            ),
            zero(offload_optimizer={"device": "cpu", "ratio": 0.5}),
            {
                "offload_optimizer": [
                    {"device": "cpu", "ratio": 0.5},
                    {"device": "cpu", "ratio": 1.0},
                    {"device": "nvme", "nvme_path": "/x", "buffer_count": 4},
                ]
            },
        ),
    ],
)
def test_a_list_is_a_choice(
    tmp_path: Path, config: dict[str, Any], base: dict[str, Any], listed: dict[str, Any]
) -> None:
    plan = Reader(User(tmp_path)).command_line({MICRO: 1, **config}, "--slots", 4)
    expected = [{MICRO: 1, **base}, {**listed, "stage": sorted(listed.get("stage", range(4)))}]
    found = [plan["base_config"], plans.listed(plan)]
    written = [json.dumps(each, sort_keys=True) for each in (found, expected)]
    assert written[0] == written[1], "true is not 1"


def test_lists_elsewhere_are_values(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 32,
        "optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.999]}},
        "comms_logger": {"prof_ops": ["all_reduce"]},
        "data_types": {"type": "categorical", "vals": [1, 2]},
        **zero(leaf_module={"classes": ["A", "B"], "names": []}),
    }
    plan = Reader(User(tmp_path)).command_line(config, "--slots", 4)
    assert (plan["base_config"], plan["choices"]) == (config, {})
