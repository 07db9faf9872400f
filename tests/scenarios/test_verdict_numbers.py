"""The numbers of a verdict against the truth of the world."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from testing.scenarios import User
from testing.started import Told
from testing.world import GIB, Finding, World, with_defaults
from tests.scenarios.test_verdict import CASES, FREE, OWN, kinds_of, line_of, run

GAS = "gradient_accumulation_steps"


def numbers(text: str) -> list[float]:
    """Return the numbers in a text that are not part of a name."""
    found = re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w])", text.replace("x", " "))
    return [float(number.replace(",", "")) for number in found]


def value_of(told: Told, which: str) -> float:
    found = told.json[which]
    assert isinstance(found, float)
    return found


@pytest.mark.parametrize("run_sd", [2e-4, 0.005, 0.05])
def test_a_gain_is_near_the_truth_and_written_as_exactly_as_it_is_known(
    user: User, run_sd: float
) -> None:
    user.world = World(run_sd=run_sd, step_sd=run_sd)
    user.has(FREE)
    told = user.tunes("--max-trials", 12, "--train-batch-size", "any", method="random")
    best, own = user.best_config(), {**told.json["baseline"]["overrides"]}
    truth = user.true_speed(best) / user.true_speed({**best, "zero_optimization": {}, **own})
    gain = told.json["finals"]["gain"]
    assert gain["low"] < gain["ratio"] == told.json["gain"] < gain["high"]
    assert gain["ratio"] == pytest.approx(truth, rel=3 * run_sd)
    assert gain["low"] < truth < gain["high"]
    digits = 2 if gain["high"] - gain["low"] >= 0.02 else 3
    written = [f"{gain[end]:.{digits}f}" for end in ("ratio", "low", "high")]
    assert re.findall(r"\d\.\d+", line_of(told, "gain"))[:3] == written
    assert (digits == 3) == (run_sd < 1e-3)


@pytest.mark.parametrize("metric", ["throughput", "latency", "tokens_per_second", "FLOPS_per_gpu"])
def test_the_headline_has_the_values_of_the_finals(user: User, metric: str) -> None:
    user.world = World(run_sd=0.05)
    user.has({**OWN, "zero_optimization": {"stage": 3}})
    told = user.tunes("--max-trials", 8, method="random", metric=metric)
    ratio = value_of(told, "best_value") / value_of(told, "own_value")
    gain = 1 / ratio if metric == "latency" else ratio
    assert told.json["gain"] == pytest.approx(gain)
    assert told.json["best_value"] != told.best["metrics"][metric], "which the search measured"
    assert f"{told.json['gain']:.2f}" in line_of(told, "gain")
    unit = 1e12 if metric == "FLOPS_per_gpu" else 1
    shown = numbers(line_of(told, "gain").partition(": ")[2])[:2]
    values = [value_of(told, which) / unit for which in ("own_value", "best_value")]
    assert shown == pytest.approx(values, rel=0.006)


def test_the_changes_are_those_of_the_configuration(user: User) -> None:
    told = run(user, CASES["stage 3"])
    best = user.best_config()
    line = line_of(told, "changes")
    for value in (best["train_micro_batch_size_per_gpu"], best["gradient_accumulation_steps"], 3):
        assert f"-> {value}" in line
    bucket = best["zero_optimization"]["reduce_bucket_size"]
    assert f"-> {bucket:,}" in line and "train_batch_size" not in line
    assert "reduce_scatter" not in line, "which is DeepSpeed's default"


@pytest.mark.parametrize(("optimizer", "power"), [("AdamW", 0.5), ("SGD", 1.0)])
def test_advice_on_the_learning_rate_and_the_schedule_follows_the_batch(
    user: User, optimizer: str, power: float
) -> None:
    lengths = {"warmup_num_steps": 1, "total_num_steps": 5001}
    user.has(
        {
            **FREE,
            "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
            "scheduler": {"type": "WarmupDecayLR", "params": lengths},
        }
    )
    told = user.tunes("--max-trials", 5, method="random")
    size = told.best["train_batch_size"]
    assert size > 1
    factor = numbers(line_of(told, "learning rate").partition(" = ")[2])[0]
    assert factor == pytest.approx(size**power, rel=0.005)
    schedule = line_of(told, "schedule")
    assert f"5001 -> {round(5001 / size)}" in schedule
    assert "1 -> 1" in schedule, "no schedule is shorter than a step"


def test_a_script_without_an_optimizer_in_its_configuration_is_told_both_factors(
    user: User,
) -> None:
    user.has({**FREE, "optimizer": {}})
    told = user.tunes("--max-trials", 5, method="random")
    size = told.best["train_batch_size"]
    line = line_of(told, "learning rate")
    assert f"= {size**0.5:.3g} " in line and f"= {size} " in line


def test_what_the_meter_reports_is_told_in_numbers(user: User) -> None:
    told = run(user, CASES["what the meter reports"])
    assert numbers(line_of(told, "late in both"))[:2] == [3, 9], "not 6, which one has alone"
    assert numbers(line_of(told, "other work"))[:2] == [25.0, 0.0]
    tokens = user.world.model.tokens
    assert numbers(line_of(told, "other lengths"))[:2] == [round(1.8 * tokens), tokens]
    assert told.best["name"] in line_of(told, "other lengths")
    assert numbers(line_of(told, "own rows"))[0] == 12


def test_a_gain_in_tokens_does_not_count_padding(user: User) -> None:
    user.world = World(findings=(Finding({"micro_batch": [8, 16]}, longer=1.8),))
    user.has(OWN)
    for metric in ("throughput", "tokens_per_second"):
        told = user.tunes("--max-trials", 8, "--run-dir", metric, method="random", metric=metric)
        line = line_of(told, "other lengths")
        assert ("Padding is a real cost" in line) is (metric == "throughput")


def test_a_slow_loader_is_told_with_its_share(user: User) -> None:
    told = run(user, CASES["a slow loader"])
    assert numbers(line_of(told, "data wait"))[0] == 31.0
    assert "--vary" in line_of(told, "data wait")


@pytest.mark.parametrize("option", [True, False])
def test_longer_sequences_need_what_the_world_says(user: User, option: bool) -> None:
    seen = user.world.model.tokens
    positions, shortest = (4 * seen, seen // 2) if not option else (seen, seen)
    user.world = World(sequences=(shortest, seen, positions))
    user.has(FREE)
    options = ("--max-seq-length", 4 * seen) if option else ()
    told = user.tunes("--max-trials", 8, *options, method="random")
    line = line_of(told, "longer sequences")
    model = dataclasses.replace(user.world.model, tokens=4 * seen)
    longer = dataclasses.replace(user.world, model=model)
    zero = {"stage": 0, **user.best_config()["zero_optimization"]}
    size = told.best["train_micro_batch_size_per_gpu"]
    need = float(re.findall(r"predicted ([\d.]+) GiB", line)[0]) * GIB
    assert need == pytest.approx(longer.memory_bytes(with_defaults(zero), size), rel=0.1)
    assert f"of {4 * seen} tokens" in line and ("--max-seq-length)" in line) is option
    fits = int(re.findall(r"--max-micro-batch (\d+)", line)[0])
    assert math.isclose(fits, longer.largest_micro_batch(with_defaults(zero)), abs_tol=1)


@pytest.mark.parametrize(("own", "stage", "kept"), [(0, 1, "0"), (1, 0, "1 2 3"), (1, 2, "")])
def test_an_optimizer_of_shapes_differs_between_stage_0_and_the_others(
    user: User, own: int, stage: int, kept: str
) -> None:
    user.world = World(by_element=False)
    user.has({**OWN, "zero_optimization": {"stage": own}})
    told = user.tunes("--max-trials", 8, "--zero-stages", stage, method="random")
    assert ("shapes" in kinds_of(told)) is bool(kept)
    if kept:
        assert line_of(told, "shapes").endswith(f"--zero-stages {kept}.")


def test_what_the_scripts_code_must_say_has_the_best_batch(user: User) -> None:
    told = run(user, CASES["what the script's code sets"])
    size, gas = (told.best[key] for key in ("train_micro_batch_size_per_gpu", GAS))
    line = line_of(told, "script")
    assert f"per_device_train_batch_size={size}, {GAS}={gas})" in line
    assert f"accumulate_grad_batches={gas})" in line and "best_ds_config.json instead" in line
    assert f"times {gas}/32" in line


def test_an_uncertain_measurement_does_not_hide_a_sure_gain(user: User) -> None:
    user.world = World(effects={"z2": 0.84}, findings=(Finding({"stage": 2}, step_sd=1.2),))
    user.has(OWN)
    told = user.tunes("--max-trials", 14, "--finals", 0, "-r", 10, method="random")
    fastest = max(told.trials, key=lambda row: row["metrics"]["throughput"])
    assert fastest["stage"] == 2 != told.best["stage"]
    assert told.json["gain"] > 1.5


def test_a_run_that_failed_is_told_with_the_scripts_own_words(user: User) -> None:
    for name, kind in (
        ("nothing runs", "first failure"),
        ("nothing else runs", "none of the others"),
    ):
        told = run(User(user.folder / kind), CASES[name])
        assert "ValueError: odd" in line_of(told, kind)
    assert told.json["gain"] == 1.0 and told.json["best"] == told.json["baseline"]


def test_gain_and_values_agree_wherever_finals_are_interrupted(user: User) -> None:
    user.world = World(run_sd=0.1)
    user.tunes("--max-trials", 14)
    events, journal = user.events(), user.folder / "run" / "journal.jsonl"
    whole = journal.read_bytes()
    begun = next(n for n, event in enumerate(events) if event["event"] == "finals")
    for count in range(begun, len(events) + 1):
        journal.write_bytes(whole)
        user.cut(count)
        told = user.types("show", "run", "--json")
        ratio = value_of(told, "best_value") / value_of(told, "own_value")
        assert value_of(told, "gain") == pytest.approx(ratio), count
