"""The limits of a search: trials, batch sizes, memory and time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testing.scenarios import User
from testing.started import Told
from testing.world import A100, GIB, Failure, Model, World
from tests.scenarios.checks import (
    EACH_METHOD,
    best_speed,
    check_result,
    micro_batches,
    of_kind,
    paired,
)

TINY = Model(layers=4, hidden=256, tokens=128, vocabulary=1000)


def tuned(
    folder: Path, config: dict[str, Any], *options: Any, method: str, world: World | None = None
) -> tuple[User, Told]:
    user = User(folder, world or World())
    user.has(config)
    told = user.tunes(*options, method=method)
    check_result(user, told)
    return user, told


def kept_for_finals(trials: int) -> int:
    """Return the number of trials that docs/certainty.md reserves for the finals."""
    if trials < 12:
        return 2 if trials >= 4 else 0
    return min(15, max(5, trials // 4))


# -- trials


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "trials"),
    [
        *(("model", trials) for trials in (2, 7, 8, 12, 24)),
        *(("asha", trials) for trials in (3, 11, 60)),
        *(("binary", trials) for trials in (5, 9, 20)),
        *(("random", trials) for trials in (2, 8, 40)),
        *(("gridsearch", trials) for trials in (4, 12)),
    ],
)
def test_no_more_trials_than_allowed_and_some_are_kept_for_the_finals(
    user: User, method: str, trials: int
) -> None:
    options = ("--stop-when", 0) if method == "model" else ()
    told = user.tunes("--max-trials", trials, *options, method=method)
    check_result(user, told)
    kept, finals = kept_for_finals(trials), of_kind(told, "final")
    assert len(told.trials) <= trials
    assert bool(finals) is bool(kept)
    assert len(of_kind(told, "search", "baseline")) <= trials - kept
    assert told.trials[len(told.trials) - len(finals) :] == finals, "they come last"
    if not kept:
        assert told.json["finals"] is None and "unconfirmed" in told.json["verdict"][0]
    elif trials >= 12:
        assert told.json["finals"]["pairs"] >= (1 if told.json["gain"] >= 1.3 else 2)
    if len(told.trials) < trials - kept:
        assert "budget" not in told.json["stop_reason"]
    if len(told.trials) < trials:
        assert "is used" not in told.json["stop_reason"], "trials for finals are left"


@pytest.mark.parametrize("trials", [2, 3])
def test_what_is_tried_until_something_fits_counts_too(tmp_path: Path, trials: int) -> None:
    """Only offloading fits, which is tried fifth."""
    model = Model(layers=44, hidden=4096, tokens=1024, vocabulary=50304)
    user = User(tmp_path, World(model=model, slots=8))
    user.has({"train_micro_batch_size_per_gpu": 8})
    told = user.tunes("--max-trials", trials)
    assert told.status == 1 and "--max-trials" in told.err
    assert len([e for e in user.events() if e["event"] == "proposed"]) == trials
    told = user.tunes("--max-trials", 12, "--resume")
    assert told.status == 0 and len(told.trials) <= 12
    check_result(user, told)


@pytest.mark.parametrize(
    ("trials", "finals", "most"),
    [(20, 0, 0), (20, 2, 2), (20, 9, 9), (10, 20, 7), (4, 20, 2), (20, 1, 0)],
)
def test_the_finals_may_be_given_more_or_fewer_trials(
    user: User, trials: int, finals: int, most: int
) -> None:
    told = user.tunes("--max-trials", trials, "--finals", finals, method="random")
    check_result(user, told)
    assert len(told.trials) <= trials and len(of_kind(told, "final")) <= most
    assert len(of_kind(told, "search", "baseline", "repeat")) == trials - most


@pytest.mark.parametrize("failures", [1, 2])
def test_trials_that_only_profile_the_model_count(user: User, failures: int) -> None:
    user.world = replace(
        user.world, failures=tuple(Failure("OOM", {"trial": n}) for n in range(failures))
    )
    user.has({"train_micro_batch_size_per_gpu": 4})
    told = user.tunes("--max-trials", 8, method="random")
    assert told.status == 0, told.err
    assert len(of_kind(told, "profile")) == failures and len(told.trials) <= 8


def test_trials_of_finals_that_cannot_be_go_to_the_search(tmp_path: Path) -> None:
    """Unless another configuration ran, there is nothing to compare."""
    unlucky = World(failures=(Failure("OOM", {"kind": "search"}),))
    _, told = tuned(tmp_path, {}, "--max-trials", 5, method="model", world=unlucky)
    assert [row["kind"] for row in told.trials] == ["baseline", *4 * ["search"]]


@pytest.mark.parametrize("method", ["model", "random"])
def test_trials_side_by_side_leave_the_finals_theirs(tmp_path: Path, method: str) -> None:
    """The first trials all begin before any has ended."""
    for trials in (8, 12, 17):
        folder = tmp_path / f"{trials}"
        told = tuned(folder, {}, "--max-trials", trials, method=method, world=World(at_once=16))[1]
        searched = of_kind(told, "baseline", "profile", "search")
        assert len(searched) <= trials - kept_for_finals(trials) and of_kind(told, "final")


@pytest.mark.parametrize(
    ("options", "micro_batch", "limits"),
    [
        (("--max-trials", 12), 1, {10.0, 20.0}),
        (("--max-trials", 12, "--finals", 0), 1, {20.0}),
        (("--max-trials", 3), 1, {20.0}),
        (("--max-trials", 12), 64, {20.0}),  # which does not fit, so that there are no finals
    ],
)
def test_a_trial_that_finals_measure_again_has_half_of_their_time(
    user: User, options: tuple[Any, ...], micro_batch: int, limits: set[float]
) -> None:
    user.has({"train_micro_batch_size_per_gpu": micro_batch})
    user.tunes(*options)
    events = map(json.loads, (user.folder / "run" / "journal.jsonl").read_text().splitlines())
    trials = [event["trial"] for event in events if event["event"] == "proposed"]
    assert {trial["longest_s"] for trial in trials if trial["longest_s"]} == limits
    assert {t["longest_s"] for t in trials if t["kind"] == "search"} == {min(limits)}


# -- batch sizes


FIXED: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "given": ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 6}, ()),
    "asked for": ({"train_micro_batch_size_per_gpu": 3}, ("--train-batch-size", 48)),
    "own": (
        {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 4},
        ("--train-batch-size", "own", "--divisible-by", 3),
    ),
}


@pytest.mark.parametrize(("method", "fixed"), paired(*FIXED))
def test_a_fixed_global_batch_is_kept_by_every_trial_of_the_search(
    tmp_path: Path, method: str, fixed: str
) -> None:
    world, (config, options) = World(slots=2), FIXED[fixed]
    user, told = tuned(tmp_path, config, "--max-trials", 20, *options, method=method, world=world)
    searched = of_kind(told, "search", "final")
    for row in searched if told.trials[0]["train_batch_size"] == 48 else of_kind(told, "search"):
        size, gas = row["train_micro_batch_size_per_gpu"], row["gradient_accumulation_steps"]
        assert row["train_batch_size"] == size * gas * 2 == 48
    assert set(micro_batches(of_kind(told, "search"))) <= {1, 2, 3, 4, 6, 8, 12, 24}
    if "--divisible-by" in options:
        assert set(micro_batches(of_kind(told, "search"))) <= {3, 6, 12, 24}
    assert told.best["train_batch_size"] == 48
    best = best_speed(world, gas=range(1, 25), total=48)
    assert user.true_speed(user.best_config()) > 0.9 * best


@pytest.mark.parametrize("method", EACH_METHOD)
def test_any_global_batch_may_be_asked_for(tmp_path: Path, method: str) -> None:
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    options = ("--max-trials", 16, "--train-batch-size", "any")
    _, told = tuned(tmp_path, config, *options, method=method)
    assert told.best["train_batch_size"] > 4
    assert {row["gradient_accumulation_steps"] for row in of_kind(told, "search")} == {2}


@pytest.mark.parametrize(
    ("method", "option", "allowed"),
    [
        ("model", ("--divisible-by", 6), range(6, 100, 6)),
        ("asha", ("--divisible-by", 6), range(6, 100, 6)),
        ("model", ("--min-micro-batch", 5, "--max-micro-batch", 11), range(5, 12)),
        ("gridsearch", ("--min-micro-batch", 5, "--max-micro-batch", 11), range(5, 12)),
        ("random", ("--max-micro-batch", 9), range(1, 10)),
    ],
)
def test_limits_of_the_micro_batch_hold(
    user: User, method: str, option: tuple[Any, ...], allowed: range
) -> None:
    told = user.tunes("--max-trials", 14, *option, method=method)
    check_result(user, told)
    sizes = micro_batches(of_kind(told, "search"))
    assert sizes and set(sizes) <= set(allowed)


@pytest.mark.parametrize("method", EACH_METHOD)
def test_a_global_batch_is_filled_up_to_what_is_allowed(tmp_path: Path, method: str) -> None:
    world, own = World(slots=2), {"train_micro_batch_size_per_gpu": 1}
    options = ("--max-trials", 14, "--max-train-batch-size", 100)
    _, told = tuned(tmp_path, own, *options, method=method, world=world)
    for row in of_kind(told, "search"):
        per_step = 2 * row["train_micro_batch_size_per_gpu"]
        assert row["train_batch_size"] == 100 // per_step * per_step
    assert told.best["train_batch_size"] <= 100


def test_no_step_exceeds_the_largest_global_batch(tmp_path: Path) -> None:
    """Only the user's own configuration, which exceeds the limit, is measured unchanged."""
    world, own = World(slots=4), {"train_micro_batch_size_per_gpu": 4}
    options = ("--max-trials", 12, "--max-train-batch-size", 8)
    _, told = tuned(tmp_path, own, *options, method="asha", world=world)
    assert told.trials[0]["train_batch_size"] == 16
    assert all(row["train_batch_size"] in (4, 8) for row in of_kind(told, "search"))
    assert told.best["train_batch_size"] <= 8


def test_an_own_batch_outside_of_what_was_asked_for_is_measured_and_replaced(
    tmp_path: Path,
) -> None:
    own = {"train_micro_batch_size_per_gpu": 24}
    _, told = tuned(tmp_path, own, "--max-trials", 12, "--train-batch-size", 8, method="model")
    assert told.trials[0]["train_batch_size"] == 24 and told.json["own_value"] > 0
    assert told.best["train_batch_size"] == 8
    assert told.json["best_value"] < told.json["own_value"]
    assert "batch sizes are not those that you asked for" in "\n".join(told.json["verdict"])


# -- memory


@pytest.mark.parametrize(("method", "memory"), paired(12, 40))
def test_nothing_is_launched_that_was_predicted_not_to_fit(
    tmp_path: Path, method: str, memory: int
) -> None:
    world = World(slots=4, gpu=replace(A100, memory_bytes=memory * GIB))
    own = {"train_micro_batch_size_per_gpu": 2}
    _, told = tuned(tmp_path, own, "--max-trials", 24, method=method, world=world)
    lost = 0
    for row in of_kind(told, "search"):
        assert row["predicted_bytes"] <= memory * GIB
        if row["outcome"] == "OK" and row["used_bytes"] > 20 * GIB:
            assert row["predicted_bytes"] == pytest.approx(row["used_bytes"], rel=0.1)
        lost += row["outcome"] == "OOM"
    assert lost <= 2


def test_without_predictions_more_trials_are_lost(tmp_path: Path) -> None:
    lost = {}
    for model in ("formula", "none"):
        options = ("--max-trials", 20, "--memory-model", model)
        own = {"train_micro_batch_size_per_gpu": 8}
        _, told = tuned(tmp_path / model, own, *options, method="asha")
        lost[model] = sum(row["outcome"] == "OOM" for row in told.trials)
        assert (of_kind(told, "search")[0]["predicted_bytes"] is None) is (model == "none")
    assert lost["formula"] < lost["none"]


def test_a_smaller_gpu_may_be_imitated(user: User) -> None:
    told = user.tunes("--max-trials", 12, "--slot-memory", "12GiB")
    check_result(user, told)
    assert all(row["predicted_bytes"] <= 12 * GIB for row in of_kind(told, "search"))


# -- time and growth


@pytest.mark.parametrize("method", EACH_METHOD)
def test_no_trial_takes_long_beside_ones_own(tmp_path: Path, method: str) -> None:
    """A trial measures at most for the time of 20 steps of the baseline, but at least three
    steps."""
    world = World(gpu=replace(A100, peak=3e11, bandwidth=1e10))
    own = {"train_micro_batch_size_per_gpu": 1}
    _, told = tuned(tmp_path, own, "--max-trials", 16, method=method, world=world)
    step_s = told.trials[0]["metrics"]["latency"] / 1000
    assert step_s > 5
    known: set[int] = set()
    for row in of_kind(told, "search"):
        # A stage that is slower than predicted is known only after a trial.
        most_s = (20 / 3 if row["stage"] in known else 20) * step_s
        assert row["metrics"]["latency"] / 1000 <= most_s, row["name"]
        known.add(row["stage"])


@pytest.mark.parametrize("method", ["asha", "binary", "random"])
def test_a_micro_batch_grows_as_long_as_that_is_worth_it(tmp_path: Path, method: str) -> None:
    """A million samples fit, but once the GPU is busy, more samples gain nothing."""
    user, told = tuned(
        tmp_path, {"train_micro_batch_size_per_gpu": 2}, "--max-trials", 20,
        method=method, world=World(model=TINY),
    )  # fmt: skip
    sizes = micro_batches(of_kind(told, "search"))
    speeds = {
        size: user.true_speed({"train_micro_batch_size_per_gpu": size})
        for size in (2**n for n in range(1, 17))
    }
    ramp = [
        size
        for n, size in enumerate(sizes)
        if size in speeds and sizes[: n + 1] == sorted(sizes[: n + 1])
    ]
    assert speeds[ramp[-1]] < 1.06 * speeds[ramp[-2]], "where growth ends"
    assert ramp[-1] < max(sizes) <= 4 * ramp[-1], "a little growth may add up"
    assert user.true_speed(user.best_config()) > 0.9 * max(speeds.values())


def test_one_trial_without_a_new_best_is_not_plural(user: User) -> None:
    told = user.tunes("--max-trials", 20, "--early-stopping", 1, method="random")
    assert told.json["stop_reason"] == "no better configuration in the last 1 trial"
