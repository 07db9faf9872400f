"""Checks that hold for every search, and the best of a whole world by brute force."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from dsat.search import SEARCHES
from testing.scenarios import User
from testing.started import Told
from testing.world import World

METHODS = tuple(SEARCHES)


def _at_once(method: str, *values: Any) -> Any:
    """Return a test case of a method; `make quick` runs two of the methods, `make test` all."""
    marks = [] if method in ("model", "asha") else [pytest.mark.slow]
    return pytest.param(method, *values, marks=marks)


EACH_METHOD = [_at_once(method) for method in METHODS]


def paired(*values: Any) -> list[Any]:
    """Return pairs of method and value: `model` with each value, every other method with one."""
    others = [_at_once(name, values[n % len(values)]) for n, name in enumerate(METHODS[1:])]
    return [*(_at_once("model", value) for value in values), *others]


def check_result(user: User, told: Told) -> None:
    """Check what holds for every successful search."""
    assert told.status == 0, told.err
    result, rows = told.json, told.trials
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names)
    assert rows[0] == result["baseline"] and rows[0]["kind"] == "baseline"
    assert result["best"] in rows and result["best"]["outcome"] == "OK"
    assert result["best_ds_config"] == user.best_config()
    assert user.true_speed(result["best_ds_config"]) > 0
    tried = [configuration(row) for row in rows if row["kind"] in ("baseline", "search")]
    assert len(set(tried)) == len(tried), "a configuration was searched twice"


def configuration(row: dict[str, Any]) -> str:
    """Return the configuration of a trial as text."""
    return json.dumps([row["overrides"], row["script_args"]], sort_keys=True)


def of_kind(told: Told, *kinds: str) -> list[dict[str, Any]]:
    """Return the rows of trials of some kinds, such as "search" and "final"."""
    return [row for row in told.trials if row["kind"] in kinds]


def micro_batches(rows: Iterable[dict[str, Any]]) -> list[int]:
    return [row["train_micro_batch_size_per_gpu"] for row in rows]


def best_speed(
    world: World,
    *,
    sizes: Iterable[int] = range(1, 65),
    gas: Iterable[int] = (1,),
    total: int | None = None,
    metric: str = "throughput",
) -> float:
    """Return the best true value of DeepSpeed's default settings over all stages and batch
    sizes."""
    found = []
    for stage in range(4):
        for size in sizes:
            for steps in gas:
                if total is not None and size * steps * world.slots != total:
                    continue
                config = {
                    "train_micro_batch_size_per_gpu": size,
                    "gradient_accumulation_steps": steps,
                    "zero_optimization": {"stage": stage},
                }
                metrics = world.answer(config).metrics
                if metrics is not None:
                    found.append(float(getattr(metrics, metric)))
    return min(found) if metric in ("latency", "forward", "backward", "step") else max(found)


def check_complete(user: User, told: Told, trials: int) -> None:
    """Check that a run reached its end, and that every trial was measured exactly once."""
    check_result(user, told)
    assert len(told.trials) <= trials
    assert all(row["outcome"] for row in told.trials)
    begun: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    for event in user.events():
        if event["event"] == "proposed":
            begun[event["trial"]["id"]] += 1
        elif event["event"] == "finished":
            ended[event["trial_id"]] += 1
    assert begun == ended and set(begun.values()) == {1}
    assert user.true_speed(user.best_config()) > 0.9 * best_speed(user.world)
