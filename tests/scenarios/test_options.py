"""Every option, by its effect on a search."""

from __future__ import annotations

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
# Options of clusters, Slurm or Ray, or with other tests.
ELSEWHERE = {
    *("--search-runner-config", "--max-search-runner-restarts", "--detach"),
    *("--ray-address", "--nodes", "--gpus-per-node"),
}


def of(told: Told, key: str) -> list[Any]:
    """Return a value of all trials except the baseline and the finals."""
    assert told.status == 0, told.err
    return [row[key] for row in told.trials if row["kind"] == "search"]


def settings(told: Told, key: str) -> set[Any]:
    """Return the values of a ZeRO setting that a search tried."""
    return {each.get("zero_optimization", {}).get(key) for each in of(told, "overrides")}


def test_every_option_is_typed_in_a_scenario() -> None:
    names = {own.flags[-1] for name in METHODS for own in options_of_command(name)}
    flags = {name for name in names if name.startswith("--")}
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")]
    typed = set(re.findall(r"--[a-z][\w-]*", "\n".join(texts)))
    options = {flag for flag in flags if flag.startswith("-")}  # without positional arguments
    assert options - typed == set() and options >= ELSEWHERE


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


AUTO = {MICRO: "auto", GAS: "auto", ALL: "auto"}
HF = "-- train.py --deepspeed ds.json --output_dir out"
CLIPS = {"gradient_clipping": 1.0}


@pytest.mark.parametrize(
    ("config", "given", "own"),
    [
        (AUTO, "--arg-mapping BATCH=--bs -- train.py --bs 2 --bs=3", (3, 1)),
        (AUTO, HF, (8, 1)),
        (AUTO, f"{HF} --per-device-train-batch-size=3 --gradient_accumulation_steps 2", (3, 2)),
        (CLIPS, HF, (8, 1)),
        ({MICRO: 2}, f"{HF} --per_device_train_batch_size 4", (2, 1)),
        ({GAS: "auto"}, f"{HF} --gradient-accumulation-steps 3", (8, 3)),
        ({ALL: 32}, HF, (32, 1)),
        ({MICRO: "auto"}, "-- train.py --epochs 3", None),
        # Arguments that only look like a Trainer's.
        (CLIPS, "-- train.py --deepspeed --output_dir out", None),
        (CLIPS, "-- train.py --deepspeed_config ds.json --output_dir out", None),
    ],
)
def test_auto_stands_for_the_scripts_own_flags(
    user: User, config: dict[str, Any], given: str, own: tuple[int, int] | None
) -> None:
    """The flags are the Trainer's, or mapped ones. If a flag is given twice, the last one
    counts."""
    user.has(config)
    options, _, command = given.replace("BATCH", MICRO).partition("-- train")
    files = () if "ds.json" in command else ("--ds-config", "ds.json")
    words = ["asha", *options.split(), *files, "--dry-run", "--json"]
    told = user.types(*words, "--", *f"train{command}".split())
    assert told.status == (0 if own else 2), told.err
    if own:
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
    """An uncertain metric is shown with its interval; a certain one has no warning."""
    user.world = World(findings=(Finding({"stage": 1}, step_sd=0.3),))
    told = user.tunes("--max-trials", 8, "--zero-stages", 1, "--finals", 0, method="random")
    errors = [metrics["ci95"] for metrics in of(told, "metrics")]
    assert min(errors) > 0.05 > told.trials[0]["metrics"]["ci95"]


def test_a_training_needs_an_engine_that_trains(user: User) -> None:
    told = user.tunes("--max-trials", 3, "--run-full-experiment", method="random")
    assert told.status == 2 and "--run-full-experiment" in told.err
