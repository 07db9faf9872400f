"""Decisions of the finals, by noise, drift, losses, failures and budgets."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.scenarios import Harm, User
from testing.started import Told
from testing.world import Failure, World
from tests.scenarios.checks import check_result, micro_batches, of_kind

SIZES = ("--min-micro-batch", 16, "--max-micro-batch", 16, "--train-batch-size", "own")
FIXED = ("--keep", "all", *SIZES)
LOOKS = {1, 2, 3, 5, 8, 13}


def tuned(
    folder: Path,
    *options: Any,
    own: int = 16,
    method: str = "asha",
    trials: int = 20,
    **world: Any,
) -> tuple[User, Told]:
    """Tune a script on two GPUs; with `FIXED`, only its ZeRO stage can change."""
    user = User(folder, World(slots=2, **world))
    user.has({"train_micro_batch_size_per_gpu": own})
    told = user.tunes("--max-trials", trials, *options, method=method)
    check_result(user, told)
    return user, told


def gain_of(user: User, config: dict[str, Any]) -> float:
    own = {"train_micro_batch_size_per_gpu": 16}
    return user.true_speed(config) / user.true_speed(own)


def faster(stage: int, factor: float) -> dict[str, Any]:
    """Return effects that make only this stage `factor` times as fast as stage 0 at micro batch
    16."""
    world = World(slots=2)
    own = {"train_micro_batch_size_per_gpu": 16}
    base = world.answer(own).metrics
    effects = {}
    for each in (1, 2, 3):
        found = world.answer({**own, "zero_optimization": {"stage": each}}).metrics
        assert base is not None and found is not None
        wanted = factor if each == stage else 0.9
        effects[f"z{each}"] = found.throughput / base.throughput / wanted
    return effects


# -- what is recommended


@pytest.mark.parametrize(
    ("noise", "seed"), [(0.0, 1), *((sd, seed) for sd in (0.01, 0.03, 0.1) for seed in (1, 2, 3))]
)
def test_nothing_worse_than_ones_own_is_recommended(
    tmp_path: Path, noise: float, seed: int
) -> None:
    """The user's own is the best. Despite noise, the result is that, or one as good."""
    own_is_best = {f"z{stage}": 1.1 for stage in (1, 2, 3)}
    world: dict[str, Any] = {"run_sd": noise, "seed": seed, "effects": own_is_best}
    user, told = tuned(tmp_path, *FIXED, **world)
    assert told.best["stage"] == 0 or gain_of(user, user.best_config()) > 0.99
    if noise < 0.05:
        assert "Keep your configuration" in told.json["verdict"][0]


@pytest.mark.parametrize("seed", [0, 2, 4, 5])
def test_noise_is_not_recommended_where_ones_own_is_not_run_again(
    tmp_path: Path, seed: int
) -> None:
    """The budget allows one pair, whose run of the user's own fails; then single runs decide."""
    world: dict[str, Any] = {"run_sd": 0.02, "seed": seed, "effects": faster(1, 0.995)}
    _, whole = tuned(tmp_path / "whole", *SIZES, trials=8, **world)
    [first, _] = [n for n, row in enumerate(whole.trials) if row["kind"] == "final"]
    failure = Failure("TIMEOUT", {"trial": first}, "no result after 600 s")
    _, told = tuned(tmp_path / "cut", *SIZES, trials=8, failures=(failure,), **world)
    assert told.trials[first]["outcome"] == "TIMEOUT"
    assert told.best["kind"] == "baseline"


@pytest.mark.parametrize(
    ("noise", "seed"), [(0.0, 1), *((sd, seed) for sd in (0.01, 0.02) for seed in (1, 2, 3))]
)
def test_a_clear_gain_is_recommended_with_an_interval_that_holds_it(
    tmp_path: Path, noise: float, seed: int
) -> None:
    effects = faster(1, 1.25)
    user, told = tuned(tmp_path, *FIXED, run_sd=noise, seed=seed, effects=effects)
    finals = told.json["finals"]
    assert told.best["stage"] == 1 and finals["significant"] and finals["recommended"]
    assert finals["gain"]["low"] > 1.05
    assert finals["gain"]["low"] * 0.98 <= 1.25 <= finals["gain"]["high"] * 1.02
    assert gain_of(user, user.best_config()) > 1.2


@pytest.mark.slow
def test_intervals_hold_the_truth_and_hardly_a_tie_replaces_ones_own(tmp_path: Path) -> None:
    """The bounds allow for chance: interval and decision may each be wrong in 5 % of runs."""
    held, shown, replaced = 0, 0, 0
    for seed in range(12):
        tie = {f"z{stage}": effect for stage, effect in _ties()}
        _, told = tuned(tmp_path / f"{seed}", *FIXED, run_sd=0.02, seed=seed, effects=tie)
        if told.json["finals"] is not None:
            shown += 1
            gain = told.json["finals"]["gain"]
            held += gain["low"] <= 1.0 <= gain["high"]
        replaced += told.best["kind"] != "baseline"
    assert shown >= 6 and held >= shown - 1
    assert replaced <= 2


def _ties() -> Iterator[tuple[int, float]]:
    for stage in (1, 2, 3):
        yield stage, faster(stage, 1.0)[f"z{stage}"]


@pytest.mark.slow
def test_pairs_are_looked_at_a_few_times_only(tmp_path: Path) -> None:
    """A look after every pair would find a gain by chance too often."""
    counts = set()
    for seed in range(10):
        options = (*FIXED, "--finals", 15)
        world: dict[str, Any] = {"run_sd": 0.02, "seed": seed, "effects": faster(1, 1.05)}
        _, told = tuned(tmp_path / f"{seed}", *options, trials=40, **world)
        finals = told.json["finals"]
        if finals is not None and len(of_kind(told, "final")) < 14:  # they ended early
            counts.add(finals["pairs"])
    assert counts and counts <= LOOKS and max(counts) > 2


@pytest.mark.parametrize("drift", [0.02, 0.05])
def test_a_machine_that_slows_down_steadily_favours_neither(tmp_path: Path, drift: float) -> None:
    effects = faster(1, 1.2)
    _, told = tuned(tmp_path, *FIXED, "--finals", 8, drift=drift, run_sd=0.001, effects=effects)
    gain = told.json["finals"]["gain"]
    assert gain["low"] < 1.2 < gain["high"]
    # In an odd number of pairs, one lacks a pair with the opposite order to cancel its drift.
    assert gain["ratio"] == pytest.approx(1.2, rel=max(0.02, drift / 2))
    order = [row["stage"] for row in of_kind(told, "final")]
    assert order[:4] in ([0, 1, 1, 0], [1, 0, 0, 1])


def test_the_users_own_is_measured_again_beside_the_leader(tmp_path: Path) -> None:
    """A lucky first run of the user's own configuration must not hide a gain."""
    for trials, budget in ((20, ()), (40, ("--finals", 15))):
        world: dict[str, Any] = {"effects": faster(1, 1.3), "lucky": {"baseline": 1.2}}
        _, told = tuned(tmp_path / f"{trials}", *FIXED, *budget, trials=trials, **world)
        assert told.best["stage"] == 1
        assert told.json["gain"] == pytest.approx(1.3, rel=0.06)


def test_a_lucky_leader_of_the_search_does_not_win(tmp_path: Path) -> None:
    world: dict[str, Any] = {"lucky": {"search": 1.3}, "run_sd": 0.003}
    effects = {f"z{stage}": effect * 1.02 for stage, effect in _ties()}
    _, told = tuned(tmp_path, *FIXED, effects=effects, **world)
    assert of_kind(told, "final") and told.best["kind"] == "baseline"
    assert "Keep your configuration" in told.json["verdict"][0]


# -- global batches


def test_the_smaller_of_two_equal_batches_is_recommended(tmp_path: Path) -> None:
    user, told = tuned(tmp_path, method="model", own=1, run_sd=0.001)
    best = told.best["train_micro_batch_size_per_gpu"]
    sizes = [size for size in micro_batches(of_kind(told, "search")) if size < best]
    for size in sizes:
        smaller = {**user.best_config(), "train_micro_batch_size_per_gpu": size}
        del smaller["train_batch_size"]
        assert user.true_speed(smaller) < 0.985 * user.true_speed(user.best_config())


def test_the_gain_at_ones_own_global_batch_is_told_too(tmp_path: Path) -> None:
    user, told = tuned(tmp_path, method="model", own=2, effects={"z1": 0.8})
    assert told.best["train_batch_size"] > 4
    kept = [row for row in of_kind(told, "final") if row["train_batch_size"] == 4]
    gain = told.json["finals"]["gain_at_own_global_batch"]
    own = {"train_micro_batch_size_per_gpu": 2}
    alike = next(row for row in kept if row["stage"] != 0)
    truly = user.true_speed({**own, **alike["overrides"]}) / user.true_speed(own)
    assert gain["low"] * 0.98 <= truly <= gain["high"] * 1.02
    _, same = tuned(tmp_path / "same", *FIXED, effects=faster(1, 1.3))
    assert same.json["finals"]["gain_at_own_global_batch"] is None


def test_a_small_gain_is_not_worth_a_larger_global_batch(tmp_path: Path) -> None:
    """At the same global batch, a small gain is worth it."""
    for options, worth_it in (((), False), (("--train-batch-size", "own"), True)):
        world: dict[str, Any] = {"run_sd": 0.0005, "step_sd": 0.0005}
        effects = {**faster(1, 1.015 if worth_it else 0.9), "z2": 9.0, "z3": 9.0}
        user, told = tuned(
            tmp_path / f"{worth_it}", "--keep", "all", *options, effects=effects, **world
        )
        gain = gain_of(user, user.best_config())
        assert (told.best["kind"] != "baseline") is (worth_it or gain > 1.02)


# -- losses


@pytest.mark.parametrize("method", ["model", "asha", "random"])
def test_what_trains_otherwise_cannot_win_and_is_named(tmp_path: Path, method: str) -> None:
    effects = {**faster(1, 1.4), "z2": faster(2, 1.2)["z2"]}
    world: dict[str, Any] = {"effects": effects, "trains_otherwise": ("z1",)}
    user, told = tuned(tmp_path, *FIXED, "--finals", 12, method=method, trials=30, **world)
    assert told.best["stage"] == 2 and told.json["gain"] == pytest.approx(1.2, rel=0.05)
    said = "\n".join(told.json["verdict"])
    assert "z1" in said and "zero_optimization.stage=1" in said and "is excluded" in said
    assert "losses agree" in said
    assert user.best_config()["zero_optimization"]["stage"] == 2


def test_if_every_leader_trains_otherwise_ones_own_is_kept(tmp_path: Path) -> None:
    world: dict[str, Any] = {"effects": faster(1, 1.4), "trains_otherwise": ("z1", "z2", "z3")}
    _, told = tuned(tmp_path, *FIXED, **world)
    assert told.best["kind"] == "baseline" and told.json["gain"] == 1.0
    assert "Keep your configuration" in told.json["verdict"][0]


def test_losses_are_compared_only_where_they_repeat(tmp_path: Path) -> None:
    world: dict[str, Any] = {"effects": faster(1, 1.4), "trains_otherwise": ("z1",)}
    _, told = tuned(tmp_path / "unseeded", *FIXED, seeded=False, **world)
    assert told.best["stage"] == 1 and "sets no seed" in "\n".join(told.json["verdict"])
    _, told = tuned(tmp_path / "larger", own=1, method="model", **world)
    assert told.best["train_batch_size"] > 2
    assert "global batch size differs" in "\n".join(told.json["verdict"])


def test_a_strategy_that_trains_otherwise_at_the_own_batch_cannot_win_at_another(
    tmp_path: Path,
) -> None:
    """Losses of another global batch cannot be compared, those of the run at one's own can."""
    user = User(tmp_path, World(slots=2, effects={"z1": 0.7}, trains_otherwise=("z1",)))
    user.has({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4})
    told = user.tunes("--max-trials", 30, "--train-batch-size", "any", method="model")
    check_result(user, told)
    said = "\n".join(told.json["verdict"])
    assert told.best["stage"] != 1 and told.best["train_batch_size"] > 16
    assert "is excluded: at your global batch" in said and "zero_optimization.stage=1" in said


# -- without finals


@pytest.mark.parametrize(("effect", "is_kept"), [(1.0, True), (1.3, False)])
def test_without_finals_a_gain_is_unconfirmed(tmp_path: Path, effect: float, is_kept: bool) -> None:
    options = (*FIXED, "--finals", 0)
    _, told = tuned(tmp_path, *options, step_sd=0.02, effects=faster(1, effect))
    assert not of_kind(told, "final") and told.json["finals"] is None
    headline = told.json["verdict"][0]
    assert (told.best["kind"] == "baseline") is is_kept
    assert ("unconfirmed" in headline) is not is_kept


def test_nothing_is_compared_where_nothing_faster_is_possible(tmp_path: Path) -> None:
    effects = {f"z{stage}": 2.0 for stage in (1, 2, 3)}
    _, told = tuned(tmp_path, *FIXED, effects=effects)
    assert not of_kind(told, "final") and told.best["kind"] == "baseline"
    assert "nothing faster was found" in told.json["verdict"][0]


def test_a_search_that_goes_on_has_finals_anew(tmp_path: Path) -> None:
    user, first = tuned(tmp_path, trials=12, own=2, run_sd=0.02)
    told = user.tunes("--max-trials", 24, "--resume", method="asha")
    check_result(user, told)
    assert len(told.trials) <= 24
    names = [row["name"] for row in told.trials]
    assert names[: len(first.trials)] == [row["name"] for row in first.trials]
    later = told.trials[len(first.trials) :]
    assert {row["kind"] for row in later} == {"search", "final"}
    assert later[-1]["kind"] == "final" and told.json["finals"]["pairs"] >= 1


def test_a_search_that_goes_on_after_its_finals_compares_equal_measurements(user: User) -> None:
    """The shown value and the gain are of the same trials, and the finals start again."""
    first = user.tunes("--max-trials", 6, method="random")
    assert first.status == 0 and any(row["kind"] == "final" for row in first.trials)
    count = len(first.trials)
    told = user.tunes(
        *("--max-trials", 12, "--resume"),
        method="random",
        harm=Harm(signals={count + 2: (signal.SIGINT,)}),
    )
    assert told.status == 130
    own = told.json["baseline"]["metrics"]["throughput"]
    best = told.best["metrics"]["throughput"]
    assert told.json["best_value"] == best
    assert told.json["gain"] == pytest.approx(best / own)
    assert any("resumed after its finals" in line for line in told.json["verdict"])
