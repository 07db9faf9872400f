"""Every search method, by a command and as an experiment: what it recommends and leaves behind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from testing.scenarios import Told, User

METHODS = ("model", "asha", "binary", "random", "gridsearch")
WAYS_IN = (False, True)


def check_result(user: User, told: Told) -> None:
    """Check what holds of every search that found something."""
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
    """Return what a trial ran, as text."""
    return json.dumps([row["overrides"], row["script_args"]], sort_keys=True)


@pytest.mark.parametrize("experiment", WAYS_IN, ids=["command", "experiment"])
@pytest.mark.parametrize("method", METHODS)
def test_a_larger_micro_batch_is_recommended(user: User, method: str, experiment: bool) -> None:
    told = user.tunes("--max-trials", 16, method=method, experiment=experiment)
    check_result(user, told)
    own, best = (told.json[name]["overrides"] for name in ("baseline", "best"))
    assert own["train_micro_batch_size_per_gpu"] == 1
    assert best["train_micro_batch_size_per_gpu"] >= 8
    truly = user.true_speed(user.best_config()) / user.true_speed({**user.best_config(), **own})
    assert told.json["gain"] == pytest.approx(truly, rel=0.05)
