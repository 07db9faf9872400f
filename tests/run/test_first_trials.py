"""The first trials: the user's own configuration, and the search for one that fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.run.strategies import make_space
from dsat.space.overrides import FORCE, overrides_for
from dsat.values.outcome import OwnOptimizer, ScriptSwitch
from testing.helpers import plan_of, weightless
from testing.scenarios import User
from testing.started import Told
from testing.world import Failure, World

OUT_OF_MEMORY = "large"


def climbing(
    folder: Path, failing: int, zero: dict[str, Any] | None = None, **config: Any
) -> tuple[User, Told]:
    """Tune a script in stage 1 whose first trials run out of memory."""
    failures = tuple(Failure("OOM", {"trial": n}, OUT_OF_MEMORY) for n in range(failing))
    user = User(folder, World(slots=2, failures=failures))
    own = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero or {"stage": 1}}
    user.has({**own, **config})
    return user, user.tunes("--max-trials", 16, "--finals", 0)


def steps_of(told: Told) -> list[tuple[str, int]]:
    found = []
    for row in told.trials:
        if row["kind"] != "search":
            strategy = row["name"].removeprefix(f"{row['kind']}_").split("_gas")[0]
            found.append((strategy, row["train_micro_batch_size_per_gpu"]))
    return found


def test_a_time_out_is_no_reason_to_climb(tmp_path: Path) -> None:
    user = User(tmp_path, World(slots=2, failures=(Failure("TIMEOUT"),)))
    user.has({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}})
    assert steps_of(user.tunes("--max-trials", 16)) == [("z1", 4), ("z1", 1)]


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 0, "reduce_bucket_size": 5}, None),
        ({"stage": 1}, {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}),
        ({"stage": 2, "reduce_bucket_size": 5}, {"allgather_bucket_size": 10**6}),
        ({"stage": 3}, {"reduce_bucket_size": 10**6}),
        ({"stage": 3, "reduce_bucket_size": 5}, None),
    ],
)
def test_buckets_are_small_for_the_profile_unless_the_user_chose_them(
    tmp_path: Path, zero: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    _, told = climbing(tmp_path, 1, zero)
    assert told.trials[1]["kind"] == "profile"
    assert told.trials[1]["overrides"].get("zero_optimization") == expected


def test_a_scripts_own_optimizer_may_be_offloaded(tmp_path: Path) -> None:
    user, _ = climbing(tmp_path, 0)
    config = json.loads((tmp_path / "ds.json").read_text())
    del config["optimizer"]
    config["zero_optimization"] = {"stage": 2}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    user.world = replace(user.world, failures=tuple(Failure("OOM", {"trial": n}) for n in range(2)))
    told = user.tunes("--max-trials", 8, "--finals", 0, "--run-dir", "other")
    offloaded = told.trials[2]["overrides"]
    assert offloaded[FORCE] is False
    assert offloaded["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


@pytest.mark.parametrize(
    ("own", "replaced", "expected"),
    [({}, False, False), ({}, True, None), ({FORCE: True}, False, None)],
)
def test_accelerate_and_the_user_decide_on_an_offloaded_optimizer(
    own: dict[str, bool], replaced: bool, expected: bool | None
) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}}
    base = {"zero_optimization": {"stage": 2, **offload}, **own}
    plan = plan_of(base_config=base, zero_stages=(1, 2))
    profile = replace(weightless(15), optimizer=OwnOptimizer(moves_to_host=replaced))
    space = make_space(plan, profile)
    for branch in space.branches:
        settings = branch.settings(0)
        assert overrides_for(settings, space.batch(4, settings)).get(FORCE) is expected


def test_every_trial_knows_the_switches_and_what_there_is_to_beat(tmp_path: Path) -> None:
    switches = {"gradient_checkpointing": ScriptSwitch((False, True), in_arguments=True)}
    user = User(tmp_path, World(slots=2, switches=switches))
    user.has()
    user.tunes("--max-trials", 14, "--finals", 0, "-z", 1, method="random")
    best = 0.0
    for event in user.events():
        if event["event"] == "proposed" and event["trial"]["kind"] == "search":
            assert event["trial"]["to_beat"] == {"throughput": best}
            assert event["trial"]["flops_per_sample"] == user.world.model.flops_per_sample
        elif event["event"] == "finished":
            best = max(best, (event["outcome"]["metrics"] or {"throughput": 0.0})["throughput"])


@pytest.mark.parametrize(
    ("own", "options", "searched"),
    [
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, (), {4}),
        ({"train_micro_batch_size_per_gpu": 4}, ("--train-batch-size", "any"), None),
        # The user's options exclude their own.
        (
            {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4},
            ("--max-micro-batch", 2),
            {1, 2, 4},
        ),
    ],
)
def test_a_loss_over_pairs_of_samples_keeps_the_micro_batch(
    own: dict[str, int], options: tuple[str, ...], searched: set[int] | None, tmp_path: Path
) -> None:
    user = User(tmp_path, World(slots=2, compares_samples=True))
    user.has(own)
    told = user.tunes("--max-trials", 10, "--finals", 0, *options)
    begun = [event["trial"] for event in user.events() if event["event"] == "proposed"]
    tried = {trial["batch"]["micro_batch"] for trial in begun}
    assert told.status == 0 and len(begun) > 2
    assert tried <= searched if searched else len(tried) > 1
