"""Lists of values in a DeepSpeed configuration, taken as the search space."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dsat.errors import UserInputError
from dsat.inputs import ds_config
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


# -- whatever is listed

POOL: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "overlap_comm": [True, False, None],
    "reduce_bucket_size": [1, 5e7, 5e8, 1e9],
    "stage3_max_live_parameters": [0, 1e9],
    "round_robin_gradients": [True, False],
}
OFFLOAD_POOL: dict[str, list[Any]] = {
    "device": ["cpu", "nvme", "none"],
    "pin_memory": [True, False],
    "buffer_count": [4, 5.0],
    "ratio": [0.5, 1.0],
}


def _random_section(rng: np.random.Generator, pool: dict[str, list[Any]]) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for key, values in pool.items():
        some = [values[i] for i in rng.permutation(len(values))[: rng.integers(1, len(values) + 1)]]
        kind = rng.integers(4)
        if kind == 0:
            section[key] = some[0]
        elif kind == 1:
            section[key] = some
        elif kind == 2:
            section[key] = {"type": "categorical", "vals": some}
    return section


def _random_config(rng: np.random.Generator) -> dict[str, Any]:
    config = _random_section(rng, {MICRO: [1, 2, 4, 8], GAS: [1, 2.0, 3]})
    section = _random_section(rng, POOL)
    if rng.integers(2):
        section["offload_optimizer"] = _random_section(rng, OFFLOAD_POOL)
    if rng.integers(2):
        section["offload_param"] = [_random_section(rng, OFFLOAD_POOL) for _ in range(2)]
    return {**config, "zero_optimization": section, "optimizer": {"params": {"betas": [0.9, 1]}}}


def _count(value: Any) -> int:
    """How many values something written in a configuration stands for."""
    if isinstance(value, dict) and value.get("type") == "categorical":
        value = value["vals"]
    if isinstance(value, list):
        return sum(_count(item) for item in value)
    if isinstance(value, dict):
        return math.prod(_count(item) for item in value.values())
    return 1


def _lists(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, list):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _lists(item)


@pytest.mark.parametrize("seed", range(60))
def test_splitting_loses_and_invents_nothing(seed: int) -> None:
    config = _random_config(np.random.default_rng(seed))
    before = copy.deepcopy(config)
    base, listed = split(config, where="ds.json")
    assert config == before, "the argument is not changed"
    # No list is left where one is a choice, and what was none is as it was.
    assert list(_lists({**base, "optimizer": None})) == []
    assert base["optimizer"] == config["optimizer"]
    assert list(base) == list(config)
    flat = {**config, **config["zero_optimization"]}
    flat_base = {**base, **base["zero_optimization"]}
    for key, values in listed.items():
        assert flat_base[key] == values[0]
        assert len({json.dumps(value) for value in values}) == len(values)
        if key != "offload_param":  # its two sections may have some in common
            assert len(values) == _count(flat[key])
    for key in flat.keys() - listed.keys() - {"zero_optimization"}:
        assert flat_base[key] == flat[key]
    # The base has nothing more to split, and laying a choice over it gives that choice.
    assert split(base, where="ds.json") == (base, {})
    for key, values in listed.items():
        for value in values:
            overlay = {key: value} if key in (MICRO, GAS) else {"zero_optimization": {key: value}}
            merged = ds_config.merge(base, overlay)
            assert {**merged, **merged["zero_optimization"]}[key] == value or isinstance(
                value, dict
            )
