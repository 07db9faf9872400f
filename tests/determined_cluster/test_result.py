"""Result of the search runner, in its log and in the web UI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsat.determined_cluster import job as jobs
from dsat.determined_cluster import result
from dsat.determined_cluster.engine import SHUTDOWN
from dsat.report.run_view import RunView, best_config
from dsat.tuning.run import Run
from testing.cluster import FakeMaster, job_of, search_of
from testing.helpers import plan_of
from tests.determined_cluster.test_search import Theatre, drain

PREFIX = "[2026-11-21T11:44:47.515877Z] 57b71f93 || "
SECRET = "hf_0123456789abcdefABCD"


def finished(**changes: Any) -> Run:
    return Theatre(plan_of("random", max_trials=6, **changes)).play().run


def logged(told: dict[str, Any]) -> list[str]:
    return [f"{PREFIX}{line}\n" for line in result.to_lines(told)]


def test_the_whole_result_goes_through_the_log() -> None:
    run = finished()
    told = result.of_run(RunView.of(run), over=True)
    lines = logged(told)
    assert all(len(line) < 4000 for line in lines)
    noise = [f"{PREFIX}[dsat] ended: all done\n", f"{PREFIX}[dsat-result] what is this?\n"]
    found = result.of_lines([*noise, *lines, *noise])
    assert found == json.loads(json.dumps(told))
    local = RunView.of(run).to_json(Path())
    for key in ("best", "best_ds_config", "baseline", "gain", "stop_reason", "trials"):
        assert found[key] == json.loads(json.dumps(local[key]))
    assert found["over"] and found["verdict"] == list(RunView.of(run).verdict.lines)


def test_the_last_whole_result_counts() -> None:
    long = {"text": [str(number**9) for number in range(5000)]}
    lines = logged(long)
    assert len(lines) > 5
    assert result.of_lines([*lines, *lines[:2]]) == long  # a runner that died while it told it
    assert result.of_lines([*lines[:2], *logged({"n": 1})]) == {"n": 1}
    assert result.of_lines([*lines[:2], *lines[3:]]) == {}
    torn = [line.replace(line[-5:-1], "!!!!") for line in lines]
    assert result.of_lines(torn) == {} and result.of_lines([]) == {}


def test_no_secret_is_told() -> None:
    base = {**plan_of().base_config, "monitor": {"wandb_token": SECRET, "url": "s3://u:pw9@x/y"}}
    run = finished(base_config=base)
    told = json.dumps(result.of_run(RunView.of(run), over=True)) + "\n".join(
        result.for_people(RunView.of(run))
    )
    assert SECRET not in told and "pw9" not in told
    config = best_config(run)
    assert config is not None and config["monitor"]["wandb_token"] == SECRET, "for use, it is"


def test_a_search_that_failed_says_so_where_its_state_does_not() -> None:
    master = FakeMaster()
    search = search_of(plan_of("random", max_trials=6), master)
    drain(search, master)
    [profile] = master.active
    detail = "Traceback (most recent call last):\n  File \"train.py\"\nKeyError: 'x'"
    master.fail(profile, detail)
    drain(search, master)
    run = search.run
    assert master.posted[-1] == (SHUTDOWN, "True")
    assert result.for_people(RunView.of(run))[:3] == detail.splitlines()
    said = result.description("my try", RunView.of(run), over=True)
    assert said.startswith("my try - FAILED: your own configuration failed: KeyError")
    assert result.metrics(RunView.of(run), over=True) == {"search_failed": 1}


def test_a_search_that_found_something_says_what() -> None:
    run = finished()
    assert run.best is not None
    view = RunView.of(run)
    verdict = view.verdict.headline
    assert result.description("", view, over=True) == verdict
    assert result.description("x", view, over=False, canceled=True) == f"x - canceled; {verdict}"
    assert result.description("x", view, over=False) == f"x - ended from outside; {verdict}"
    found = result.metrics(view, over=True)
    assert found == {"search_failed": 0, "throughput": run.best_value}


def test_what_varies_is_declared_and_each_trial_has_a_value_of_it() -> None:
    plan = plan_of("random", max_trials=12, slots_per_trial=2)
    run = Theatre(plan).play().run
    declared = jobs.custom_config(job_of(plan), 1, {})["hyperparameters"][jobs.VARIED]
    for trial in run.trials.values():
        values = jobs.varied(trial)
        assert values.keys() == declared.keys()
        for name, value in values.items():
            kind = declared[name]
            if kind["type"] == "categorical":
                assert value in kind["vals"], (name, value)
            elif kind["type"] == "int":
                assert kind["minval"] <= value <= kind["maxval"], (name, value)
    assert len({jobs.varied(trial)["micro_batch"] for trial in run.trials.values()}) > 2
