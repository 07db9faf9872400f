"""Every option, by what it does to a search."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dsat.cli.parser import METHODS, options_of_command
from testing.scenarios import User
from testing.started import Told
from testing.world import Finding, World

MICRO, GAS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
ALL, ZERO = "train_batch_size", "zero_optimization"
# Of a cluster, Slurm or Ray, or of what other tests look at.
ELSEWHERE = {
    *("--search-runner-config", "--max-search-runner-restarts", "--detach"),
    *("--ray-address", "--nodes", "--gpus-per-node"),
}


def of(told: Told, key: str) -> list[Any]:
    """Return a value of all trials but the user's own and the finals."""
    assert told.status == 0, told.err
    return [row[key] for row in told.trials if row["kind"] == "search"]


def settings(told: Told, key: str) -> set[Any]:
    """Return the values of a ZeRO setting that a search tried."""
    return {each.get("zero_optimization", {}).get(key) for each in of(told, "overrides")}


def test_every_option_is_typed_in_a_scenario() -> None:
    flags = {own.flags[-1] for name in METHODS for own in options_of_command(name)}
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")]
    typed = set(re.findall(r"--[a-z][\w-]*", "\n".join(texts)))
    assert flags - typed == set() and flags >= ELSEWHERE


@pytest.mark.parametrize("method", ["model", "asha", "random"])
def test_batch_sizes_are_within_their_bounds(user: User, method: str) -> None:
    bounds = ("--min-micro-batch", 4, "--max-micro-batch", 18, "--divisible-by", 4)
    told = user.tunes("--max-trials", 12, *bounds, method=method)
    sizes = set(of(told, MICRO))
    assert sizes <= {4, 8, 12, 16} and max(sizes) == 16


@pytest.mark.parametrize("method", ["model", "gridsearch"])
def test_accumulation_fills_the_largest_global_batch(user: User, method: str) -> None:
    told = user.tunes("--max-trials", 10, "--max-train-batch-size", 36, method=method)
    for size, gas in zip(of(told, MICRO), of(told, GAS), strict=True):
        assert size <= 36 and gas == 36 // size, "as often as it goes, and once at least"


@pytest.mark.parametrize(("asked", "kept"), [((), 32), (("any",), None), (("own",), 32), ((8,), 8)])
def test_a_global_batch_is_kept_or_free(user: User, asked: tuple[Any, ...], kept: int) -> None:
    user.has({ALL: 32, MICRO: 1})
    options = ("--train-batch-size", *asked) if asked else ()
    told = user.tunes("--max-trials", 6, "--finals", 0, *options, method="random")
    sizes = set(of(told, ALL))
    assert sizes == {kept} if kept else len(sizes) > 1


def test_stages_and_settings_that_are_searched_or_left_alone(user: User) -> None:
    user.world = World(slots=2)
    zero = {"stage": 2, "overlap_comm": True, "reduce_scatter": "auto"}
    user.has({MICRO: 1, "zero_optimization": zero})

    def space(*options: object) -> list[str]:
        words = ("model", "deepspeed.yaml", ".", "--dry-run", "--json", *options)
        return [str(line) for line in user.types(*words).json["plan"]["space"]]

    usual, other = space(), space("--keep", "reduce_bucket_size", "--search", "overlap_comm")
    for setting, searched in (
        ("overlap_comm", (False, True)),  # which the configuration sets
        ("reduce_bucket_size", (True, False)),
        ("reduce_scatter", (True, True)),  # which is "auto"
    ):
        assert tuple(setting in lines[-1] for lines in (usual, other)) == searched
    told = user.tunes("--max-trials", 14, "--zero-stages", 2, 3, method="asha")
    assert set(of(told, "stage")) == {2, 3}
    told = user.tunes("--max-trials", 6, "--keep", "all", "--run-dir", "fixed", method="random")
    assert {"overlap_comm", "stage"} >= {
        key for each in of(told, "overrides") for key in each[ZERO]
    }


def test_a_list_in_the_configuration_is_what_is_searched(user: User) -> None:
    user.world = World(slots=2)
    user.has({MICRO: [2, 4], ZERO: {"stage": [1, 2], "overlap_comm": [True, False]}})
    told = user.tunes("--max-trials", 16, "--stop-when", 0)
    assert set(of(told, "stage")) == {1, 2} and set(of(told, MICRO)) <= {2, 4}
    assert settings(told, "overlap_comm") <= {True, False}


def test_switches_of_the_script_are_searched(user: User) -> None:
    user.world = World(effects={"--workers=4": 0.7, "ENV:KIND=b": 0.9})
    options = ("--vary", "--workers=0,4", "--vary", "ENV:KIND=a,b")
    told = user.tunes("--max-trials", 24, *options)
    assert told.best["script_args"] == {"--workers": "4", "ENV:KIND": "b"}


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ("--arg-mapping BATCH=--batch-size -- train.py --batch-size 2 --batch-size 3", (3, 1)),
        ("-- train.py --deepspeed ds.json --output_dir out", (8, 1)),
        (
            "-- train.py --deepspeed ds.json --output_dir out --per-device-train-batch-size=3 "
            "--gradient_accumulation_steps 2",
            (3, 2),
        ),
    ],
)
def test_auto_stands_for_the_scripts_own_flags(
    user: User, given: str, own: tuple[int, int]
) -> None:
    """Of a Trainer, or mapped; of a flag that is given twice the last one counts."""
    user.has({MICRO: "auto", GAS: "auto", ALL: "auto"})
    options, _, command = given.replace("BATCH", MICRO).partition("-- train")
    files = () if "ds.json" in command else ("--ds-config", "ds.json")
    words = ["asha", *options.split(), *files, "--dry-run", "--json"]
    told = user.types(*words, "--", *f"train{command}".split())
    batch = told.json["plan"]["own_batch"]
    assert (batch["micro_batch"], batch["gas"]) == own


def test_offloading_to_files_is_the_last_resort(user: User, tmp_path: Path) -> None:
    user.world = World(host_memory_bytes=10**8)
    user.has({MICRO: 1})
    plans = [
        user.types("model", "deepspeed.yaml", ".", "--dry-run", *more).out
        for more in ((), ("--nvme-path", str(tmp_path)))
    ]
    assert ["nvme" in plan for plan in plans] == [False, True]


def test_a_smaller_card_is_imitated(user: User) -> None:
    told = user.tunes("--max-trials", 10, "--slot-memory", "12GiB", method="random")
    predicted = [size for size in of(told, "predicted_bytes") if size]
    assert predicted and max(predicted) <= 12 * 2**30
    assert max(of(told, MICRO)) < 12


def test_memory_is_predicted_or_not(user: User) -> None:
    for model in ("formula", "none"):
        options = ("--memory-model", model, "--run-dir", model)
        told = user.tunes("--max-trials", 8, *options, method="random")
        assert (None in of(told, "predicted_bytes")) is (model == "none")
        assert ("OOM" in of(told, "outcome")) is (model == "none")


def test_budgets_finals_and_seeds(user: User) -> None:
    found = {}
    for seed in (1, 2):
        options = ("--random-seed", seed, "--finals", 3, "--run-dir", seed)
        told = user.tunes("--max-trials", 20, *options, method="random")
        kinds = [row["kind"] for row in told.trials]
        assert len(kinds) <= 20 and kinds.count("final") <= 3
        found[seed] = [str(each) for each in of(told, "overrides")]
    assert found[1] != found[2]
    told = user.tunes("--max-trials", 20, "--random-seed", 1, "--finals", 3, method="random")
    assert [str(each) for each in of(told, "overrides")] == found[1]


def test_a_search_stops_when_little_is_to_be_gained(user: User) -> None:
    counts = []
    for rest in ("0.5", "0"):
        told = user.tunes("--max-trials", 16, "--stop-when", rest, "--run-dir", rest)
        counts.append(len(told.trials))
    assert counts[0] < counts[1] and "budget of 16" in told.json["stop_reason"]
    counts = []
    for more in ((), ("--early-stopping", 1)):
        options = ("--max-trials", 30, "--run-dir", f"grid{len(more)}", *more)
        counts.append(len(user.tunes(*options, method="gridsearch").trials))
    assert counts[0] > counts[1]


@pytest.mark.parametrize(
    ("method", "words", "options"),
    [
        ("asha", "--max-rungs 3 --divisor 4", {"max_rungs": 3, "divisor": 4}),
        ("asha", "--min-binary-search-trials 2", {"min_trials": 2}),
        ("asha", "--asha-early-stopping 2", {"early_stopping": 2}),
        ("binary", "--search-range-factor 1.5", {"search_range_factor": 1.5}),
        ("random", "--trials-per-random-config 2", {"trials_per_config": 2}),
        ("gridsearch", "--num-micro-batches 2", {"num_micro_batches": 2}),
    ],
)
def test_methods_have_options_of_their_own(
    user: User, method: str, words: str, options: dict[str, Any]
) -> None:
    command = (method, "deepspeed.yaml", ".", "--dry-run", "--json", *words.split())
    plan = user.types(*command).json["plan"]
    assert plan["search_options"].items() >= options.items()
    told = user.tunes("--max-trials", 8, *words.split(), method=method)
    assert told.json["gain"] > 1.5


@pytest.mark.parametrize(
    ("options", "at_once"), [((), 4), (("--max-slots", 2), 2), (("--max-concurrent-trials", 3), 3)]
)
def test_trials_run_at_once_on_the_slots_that_they_may_use(
    user: User, options: tuple[object, ...], at_once: int
) -> None:
    user.world = World(at_once=4)
    told = user.tunes("--max-trials", 12, *options, method="random")
    assert told.status == 0
    assert json.loads(user.reads("status.json"))["at_once"] == at_once


def test_steps_of_a_trial(user: User) -> None:
    words = "--start-profile-step 2 --end-profile-step 9 --max-measured-steps 5"
    more = "--metric latency --trial-timeout 90s --no-fork --max-seq-length 64 --add-files ds.json"
    command = (
        "tune",
        "--method",
        "asha",
        "deepspeed.yaml",
        ".",
        *words.split(),
        *more.split(),
        "--dry-run",
        "--json",
    )
    plan = user.types(*command).json["plan"]
    assert plan["measured"]["steps"] == [2, 6, 5], "the last one within the most that are measured"
    assert (plan["method"], plan["max_seq_length"]) == ("asha", 64)


def test_the_autotuning_section_is_a_search(user: User) -> None:
    section = {
        "enabled": True,
        "metric": "throughput",
        "tuner_type": "random",
        "tuner_num_trials": 8,
        "max_train_micro_batch_size_per_gpu": 8,
    }
    user.has({MICRO: 1, "autotuning": section})
    told = user.types("tune", "--devices", 1, "--json", *SCRIPT)
    assert told.json["metric"] == "throughput" and 3 < len(of(told, "name")) <= 8
    assert max(of(told, MICRO)) <= 8
    dry = user.types("run", "--dry-run", *SCRIPT)
    assert dry.status == 0 and "random search" in dry.out
    trains = user.tunes("--max-trials", 3, "--run-full-experiment", method="random")
    assert trains.status == 2 and "--run-full-experiment" in trains.err, "nothing real ran"


SCRIPT = ("train.py", "--deepspeed_config", "ds.json")


def test_a_dry_run_tells_the_plan_and_leaves_nothing(user: User) -> None:
    before = sorted(user.folder.rglob("*"))
    told = user.types("model", "deepspeed.yaml", ".", "--dry-run")
    assert told.status == 0 and told.err == ""
    for part in ("model", "FLOPS_per_gpu", "reduce_bucket_size", "train.py", "stage 3"):
        assert part in told.out
    shown = user.types("model", "deepspeed.yaml", ".", "--dry-run", "--json").json
    assert shown["command"][-1] == "train.py" and shown["first_trial"]["kind"] == "baseline"
    assert sorted(user.folder.rglob("*")) == before


def test_only_what_is_measured_long_enough_is_compared(user: User) -> None:
    """An uncertain metric is told with its interval; a certain one without a warning."""
    user.world = World(findings=(Finding({"stage": 1}, step_sd=0.3),))
    told = user.tunes("--max-trials", 8, "--zero-stages", 1, "--finals", 0, method="random")
    errors = [metrics["ci95"] for metrics in of(told, "metrics")]
    assert min(errors) > 0.05 > told.trials[0]["metrics"]["ci95"]
