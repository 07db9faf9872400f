"""Every search method, by a command and as an experiment: its recommendation and its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testing.scenarios import User
from testing.started import Told
from testing.world import A100, GIB, World
from tests.scenarios.checks import EACH_METHOD, best_speed, check_result, of_kind, paired

WORLDS = {
    "one GPU": World(),
    "eight GPUs": World(slots=8, effects={"overlap_comm=True": 1.03, "z3": 1.1}),
    "few bytes": World(slots=4, gpu=replace(A100, memory_bytes=14 * GIB)),
}


@pytest.mark.parametrize(("method", "experiment"), paired(False, True))
def test_a_larger_micro_batch_is_recommended(user: User, method: str, experiment: bool) -> None:
    told = user.tunes("--max-trials", 16, method=method, experiment=experiment)
    check_result(user, told)
    own, best = (told.json[name]["overrides"] for name in ("baseline", "best"))
    assert own["train_micro_batch_size_per_gpu"] == 1
    assert best["train_micro_batch_size_per_gpu"] >= 8
    truly = user.true_speed(user.best_config()) / user.true_speed({**user.best_config(), **own})
    assert told.json["gain"] == pytest.approx(truly, rel=0.05)


@pytest.mark.parametrize(("method", "world"), paired(*WORLDS))
def test_nearly_the_best_of_the_world_is_found(tmp_path: Path, method: str, world: str) -> None:
    user = User(tmp_path, WORLDS[world])
    user.has()
    told = user.tunes("--max-trials", 40, "-r", 3, method=method)
    check_result(user, told)
    reached = user.true_speed(user.best_config()) / best_speed(user.world)
    assert reached > 0.93


@pytest.mark.parametrize(("method", "metric"), paired("latency", "step", "forward"))
def test_times_are_made_short_at_a_fixed_global_batch(
    tmp_path: Path, method: str, metric: str
) -> None:
    """A step has 32 samples, so fewer and larger micro steps are faster."""
    user = User(tmp_path, World(slots=2, effects={"z1": 0.9}))
    user.has({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 1})
    told = user.tunes("--max-trials", 24, "--keep", "all", method=method, metric=metric)
    check_result(user, told)
    assert {row["train_batch_size"] for row in told.trials} == {32}
    found = getattr(user.world.answer(user.best_config()).metrics, metric)
    best = best_speed(user.world, gas=(1, 2, 4, 8, 16), total=32, metric=metric)
    assert found <= 1.05 * best
    assert told.json["gain"] >= 1.0


@pytest.mark.parametrize("metric", ["FLOPS_per_gpu", "tokens_per_second"])
def test_other_metrics_lead_to_the_same_answer(user: User, metric: str) -> None:
    told = user.tunes("--max-trials", 12, metric=metric)
    check_result(user, told)
    assert user.true_speed(user.best_config()) > 0.93 * best_speed(user.world)
    assert told.json["best_value"] == pytest.approx(told.best["metrics"][metric], rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("method", EACH_METHOD)
def test_a_seed_decides_which_trials_run(tmp_path: Path, method: str) -> None:
    def overrides(seed: int, folder: str) -> list[Any]:
        user = User(tmp_path / folder, World(slots=2, run_sd=0.0, step_sd=0.0))
        user.has()
        options = ("--max-trials", 16, "--finals", 0, "-z", 3, "--random-seed", seed)
        told = user.tunes(*options, method=method)
        return [row["overrides"] for row in told.trials]

    first = overrides(1, "first")
    assert first == overrides(1, "again")
    if method in ("asha", "binary", "random"):
        assert first != overrides(2, "other")


@pytest.mark.parametrize("method", EACH_METHOD)
def test_trials_run_side_by_side_and_finals_alone(tmp_path: Path, method: str) -> None:
    """The engine rejects a trial for which it has no devices."""
    user = User(tmp_path, World(slots=2, at_once=4))
    user.has()
    told = user.tunes("--max-trials", 24, method=method)
    check_result(user, told)
    assert user.true_speed(user.best_config()) > 0.93 * best_speed(user.world)
    most = {"search": 0, "final": 0}
    running: dict[int, str] = {}
    for event in user.events():
        if event["event"] == "proposed":
            trial = event["trial"]
            running[trial["id"]] = trial["kind"]
            if trial["kind"] in most:
                most[trial["kind"]] = max(most[trial["kind"]], len(running))
        elif event["event"] == "finished":
            del running[event["trial_id"]]
    assert 2 <= most["search"] <= 4 and most["final"] in (0, 1)


@pytest.mark.parametrize(
    ("slots", "at_once"), [(("--max-slots", 4), 2), (("--max-concurrent-trials", 1), 1)]
)
def test_fewer_run_at_once_if_that_is_asked_for(
    tmp_path: Path, slots: tuple[Any, ...], at_once: int
) -> None:
    user = User(tmp_path, World(slots=2, at_once=4))
    user.has()
    told = user.tunes("--max-trials", 12, "--finals", 0, *slots, method="random")
    check_result(user, told)
    running, most = 0, 0
    for event in user.events():
        running += {"proposed": 1, "finished": -1}.get(event["event"], 0)
        most = max(most, running)
    assert most == at_once


@pytest.mark.parametrize(
    ("method", "options", "searched"),
    [
        ("model", ("--early-stopping", 3, "--stop-when", 0), range(3, 30)),
        ("random", ("--early-stopping", 2), range(2, 30)),
        ("random", ("--trials-per-random-config", 1), range(1, 60)),
    ],
)
def test_a_search_ends_early_if_it_is_told_to(
    user: User, method: str, options: tuple[Any, ...], searched: range
) -> None:
    user.has({"train_micro_batch_size_per_gpu": 16})
    told = user.tunes("--max-trials", 60, "--finals", 0, *options, method=method)
    check_result(user, told)
    assert len(of_kind(told, "search")) in searched
    if "--early-stopping" in options:
        assert f"no better configuration in the last {options[1]} trials" in stop_of(told)
        last = [row["metrics"]["throughput"] for row in told.trials[-options[1] :]]
        before = [row["metrics"]["throughput"] for row in told.trials[: -options[1]]]
        assert max(last) <= max(before) == before[-1], "configurations without a trial count not"


@pytest.mark.parametrize("threshold", [0.2, 0.05])
def test_the_model_stops_where_no_gain_is_expected(user: User, threshold: float) -> None:
    told = user.tunes("--max-trials", 60, "--finals", 0, "--stop-when", threshold)
    check_result(user, told)
    assert f"expected to gain more than {100 * threshold:g} %" in stop_of(told)
    assert len(told.trials) < 30
    assert user.true_speed(user.best_config()) > (1 - threshold) * best_speed(user.world)


def test_a_grid_tries_everything_that_fits_but_what_is_known(tmp_path: Path) -> None:
    """It tries powers of two in each stage, without repeating the baseline."""
    user = User(tmp_path, World(slots=2))
    user.has({"train_micro_batch_size_per_gpu": 8})
    told = user.tunes("--max-trials", 40, "--keep", "all", "--finals", 0, method="gridsearch")
    check_result(user, told)
    searched = of_kind(told, "search", "baseline")
    tried = {(row["stage"], row["train_micro_batch_size_per_gpu"]) for row in searched}
    assert tried == {(stage, size) for stage in range(4) for size in (1, 2, 4, 8, 16)}
    assert stop_of(told) == "every configuration was tried"


def stop_of(told: Told) -> str:
    reason = told.json["stop_reason"]
    assert isinstance(reason, str)
    return reason
