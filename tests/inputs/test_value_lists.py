"""Lists of values in a DeepSpeed configuration, taken as the search space."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsat.errors import UserInputError
from dsat.inputs.value_lists import split

MICRO, GAS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def zero(**section: Any) -> dict[str, Any]:
    return {"zero_optimization": section}


@pytest.mark.parametrize(
    ("config", "base", "listed"),
    [
        pytest.param({}, {}, {}, id="empty"),
        pytest.param(
            {MICRO: 4, **zero(stage=2, overlap_comm=True)},
            {MICRO: 4, **zero(stage=2, overlap_comm=True)},
            {},
            id="nothing listed",
        ),
        pytest.param(zero(stage=[2, 3]), zero(stage=2), {"stage": [2, 3]}, id="stages"),
        pytest.param(zero(stage="all"), zero(stage=0), {"stage": [0, 1, 2, 3]}, id="all"),
        pytest.param(
            zero(stage=[3, "all"]), zero(stage=3), {"stage": [3, 0, 1, 2]}, id="all in a list"
        ),
        pytest.param(
            {"zero_optimization": "all"}, zero(stage=0), {"stage": [0, 1, 2, 3]}, id="zero all"
        ),
        pytest.param(zero(stage=[1.0, 2]), zero(stage=1), {"stage": [1, 2]}, id="stage 1.0"),
        pytest.param({MICRO: [4]}, {MICRO: 4}, {MICRO: [4]}, id="a list of one"),
        pytest.param({MICRO: [4, 1, 4]}, {MICRO: 4}, {MICRO: [4, 1]}, id="twice the same"),
        pytest.param({MICRO: [4.0, 1e1]}, {MICRO: 4}, {MICRO: [4, 10]}, id="whole floats"),
        pytest.param({GAS: [1, 2]}, {GAS: 1}, {GAS: [1, 2]}, id="gas"),
        pytest.param(
            zero(reduce_bucket_size=[5e7, 5e8], overlap_comm=[True, False]),
            zero(reduce_bucket_size=50_000_000, overlap_comm=True),
            {"reduce_bucket_size": [50_000_000, 500_000_000], "overlap_comm": [True, False]},
            id="buckets become integers",
        ),
        pytest.param(
            zero(reduce_bucket_size=["auto", 5e8], stage3_prefetch_bucket_size=[0, 1]),
            zero(reduce_bucket_size="auto", stage3_prefetch_bucket_size=0),
            {"reduce_bucket_size": ["auto", 500_000_000], "stage3_prefetch_bucket_size": [0, 1]},
            id="auto and nothing",
        ),
        pytest.param(
            zero(offload_optimizer=[{"device": "none"}, {"device": "cpu"}]),
            zero(offload_optimizer={"device": "none"}),
            {"offload_optimizer": [{"device": "none"}, {"device": "cpu"}]},
            id="a list of sections",
        ),
        pytest.param(
            zero(offload_optimizer=[None, {"device": "cpu"}]),
            zero(offload_optimizer=None),
            {"offload_optimizer": [None, {"device": "cpu"}]},
            id="null among sections",
        ),
        pytest.param(
            zero(offload_optimizer={"device": "cpu", "pin_memory": [True, False], "ratio": 1.0}),
            zero(offload_optimizer={"device": "cpu", "pin_memory": True, "ratio": 1.0}),
            {
                "offload_optimizer": [
                    {"device": "cpu", "pin_memory": True, "ratio": 1.0},
                    {"device": "cpu", "pin_memory": False, "ratio": 1.0},
                ]
            },
            id="a list in a section",
        ),
        pytest.param(
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
            id="lists in a list of sections",
        ),
        pytest.param(
            {
                MICRO: {"type": "categorical", "vals": [2, 4]},
                **zero(overlap_comm={"type": "categorical", "vals": [False, True]}),
            },
            {MICRO: 2, **zero(overlap_comm=False)},
            {MICRO: [2, 4], "overlap_comm": [False, True]},
            id="Determined's form",
        ),
        pytest.param(
            zero(leaf_module={"classes": ["A", "B"], "names": []}),
            zero(leaf_module={"classes": ["A", "B"], "names": []}),
            {},
            id="what is a list in itself",
        ),
        pytest.param({"zero_optimization": None}, {"zero_optimization": None}, {}, id="null"),
    ],
)
def test_a_list_is_a_choice(
    config: dict[str, Any], base: dict[str, Any], listed: dict[str, Any]
) -> None:
    found_base, found = split(config, where="ds.json")
    assert json.dumps([found_base, found]) == json.dumps([base, listed]), "true is not 1"


def test_lists_elsewhere_are_values() -> None:
    config = {
        "train_batch_size": 32,
        "optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.999]}},
        "comms_logger": {"prof_ops": ["all_reduce"]},
        "flops_profiler": {"x": [1, 2]},
        "autotuning": {"num_gpus": [1, 2]},
        "data_types": {"type": "categorical", "vals": [1, 2]},
    }
    assert split(config, where="ds.json") == (config, {})


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"train_batch_size": [8, 16]},
            "ds.json: train_batch_size: cannot be a list. List train_micro_batch_size_per_gpu and "
            "gradient_accumulation_steps instead.",
        ),
        *(
            ({MICRO: [1, bad]}, f"ds.json: {MICRO}: must be a positive integer, not {bad!r}")
            for bad in ("2", 1.5, True, 0, -1, None, "auto", [2], {"x": 1})
        ),
        ({GAS: [1, "2"]}, f"ds.json: {GAS}: must be a positive integer, not '2'"),
        (
            {MICRO: []},
            f"ds.json: {MICRO}: is an empty list. Give at least one value, or leave it out.",
        ),
        (
            zero(overlap_comm={"type": "categorical"}),
            "ds.json: zero_optimization.overlap_comm: is an empty list. Give at least one value, "
            "or leave it out.",
        ),
        (
            zero(overlap_comm={"type": "categorical", "vals": True}),
            "ds.json: zero_optimization.overlap_comm: vals must be a list, not True",
        ),
        (
            {MICRO: {"type": "int", "minval": 1, "maxval": 8}},
            f"ds.json: {MICRO}: is a range (int). Give a list of values instead.",
        ),
        *(
            (
                zero(stage=stage),
                'ds.json: zero_optimization.stage: must be 0, 1, 2, 3 or "all", or a list of '
                f"them, not {bad!r}",
            )
            for stage, bad in (
                (4, 4),
                ([1, 4], 4),
                ("1", "1"),
                (True, True),
                ([0, True], True),
                ([1.5], 1.5),
                ([[1]], [1]),
                ("ALL", "ALL"),
                (None, None),
            )
        ),
        (
            zero(stage=[]),
            "ds.json: zero_optimization.stage: is an empty list. Give at least one value, or leave "
            "it out.",
        ),
        (
            zero(overlap_comm=[[True, False]]),
            "ds.json: zero_optimization.overlap_comm: holds a list in a list, [True, False]",
        ),
        (
            zero(offload_optimizer={"device": "cpu", "pin_memory": []}),
            "ds.json: zero_optimization.offload_optimizer.pin_memory: is an empty list. Give at "
            "least one value, or leave it out.",
        ),
        *(
            (
                {"zero_optimization": bad},
                f"ds.json: zero_optimization: must be a mapping, not {bad!r}. Put lists inside it, "
                'for example {"stage": [1, 2]}.',
            )
            for bad in ([{"stage": 1}], "stage1")
        ),
    ],
)
def test_every_mistake_is_one_line(config: dict[str, Any], line: str) -> None:
    with pytest.raises(UserInputError) as caught:
        split(config, where="ds.json")
    assert str(caught.value) == line
