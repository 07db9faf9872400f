"""What a search may change: as a dry run lists it, and as trials show it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.values.outcome import ScriptSwitch
from testing.scenarios import User
from testing.started import Told
from testing.world import Failure, World
from tests.scenarios.checks import EACH_METHOD, check_result, of_kind

ALWAYS = {"reduce_bucket_size", "contiguous_gradients"}
OF_SEVERAL = {*ALWAYS, "overlap_comm", "reduce_scatter"}
FETCHING = {
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
}
SWITCHES = {
    "gradient_checkpointing": ScriptSwitch((False, True), in_arguments=True),
    "attn_implementation": ScriptSwitch(("sdpa", "eager")),
}


def planned(user: User, *options: Any) -> dict[str, dict[str, list[str]]]:
    """Return the settings of each strategy with their values in order, from a dry run."""
    words = ["--dry-run", "--slots", user.world.slots, "--ds-config", "ds.json", "--json"]
    words += ["--engine", "local", *options, "--", "train.py"]
    told = user.types("model", *words)
    assert told.status == 0, told.err
    found: dict[str, dict[str, list[str]]] = {}
    for line in told.json["plan"]["space"]:
        strategy, _, settings = line.partition(": ")
        found[strategy] = {}
        for setting in settings.split(", "):
            name, _, values = setting.partition(" ")
            if "|" in values:
                found[strategy][name] = values.split("|")
    return found


def user_of(
    folder: Path, slots: int = 2, zero: dict[str, Any] | None = None, **config: Any
) -> User:
    user = User(folder, World(slots=slots))
    section = {} if zero is None else {"zero_optimization": zero}
    user.has({"train_micro_batch_size_per_gpu": 2, **section, **config})
    return user


def searched(told: Told) -> dict[str, set[str]]:
    """Return the values of each setting in the trials of a search."""
    found: dict[str, set[str]] = {}
    for row in of_kind(told, "search"):
        for name, value in {**row["overrides"]["zero_optimization"], **row["script_args"]}.items():
            found.setdefault(name, set()).add(str(value))
    return found


# -- which settings


@pytest.mark.parametrize(
    ("slots", "stage", "settings"),
    [
        (2, 0, set()),
        (1, 1, ALWAYS),
        (1, 2, ALWAYS),
        (2, 1, OF_SEVERAL),
        (2, 2, OF_SEVERAL),
        (1, 3, {*ALWAYS, "sub_group_size"}),
        (8, 3, {*OF_SEVERAL, *FETCHING, "sub_group_size"}),
    ],
)
def test_the_settings_of_a_stage(
    tmp_path: Path, slots: int, stage: int, settings: set[str]
) -> None:
    found = planned(user_of(tmp_path, slots))
    assert set(found[f"stage {stage}"]) == settings
    # DeepSpeed's own values come first.
    first = {name: values[0] for name, values in found[f"stage {stage}"].items()}
    expected = {"reduce_bucket_size": "5e+08", "contiguous_gradients": "true"}
    assert all(first[name] == value for name, value in expected.items() if name in first)


def test_only_the_stages_asked_for(tmp_path: Path) -> None:
    assert set(planned(user_of(tmp_path), "-z", 1, 3)) == {"stage 1", "stage 3"}


@pytest.mark.parametrize(
    ("zero", "options", "values"),
    [
        ({"stage": 2, "overlap_comm": False}, (), None),
        ({"stage": 2, "overlap_comm": False}, ("--search", "overlap_comm"), ["false", "true"]),
        ({"stage": 2, "overlap_comm": True}, ("--search", "overlap_comm"), ["true", "false"]),
        ({"stage": 2}, ("--keep", "overlap_comm"), None),
        ({"stage": 2}, ("--keep", "all"), None),
        ({"stage": 2, "overlap_comm": "auto"}, (), ["false", "true"]),
    ],
)
def test_what_the_user_set_stays_unless_it_is_freed(
    tmp_path: Path, zero: dict[str, Any], options: tuple[Any, ...], values: list[str] | None
) -> None:
    found = planned(user_of(tmp_path, zero=zero), *options)
    assert found["stage 2"].get("overlap_comm") == values
    if options == ("--keep", "all"):
        assert not any(found.values())


def test_a_freed_bucket_begins_with_the_users_own_size(tmp_path: Path) -> None:
    user = user_of(tmp_path, zero={"stage": 2, "reduce_bucket_size": 7 * 10**6})
    assert "reduce_bucket_size" not in planned(user)["stage 2"]
    is_open = user_of(tmp_path / "auto", zero={"stage": 2, "reduce_bucket_size": "auto"})
    assert "reduce_bucket_size" in planned(is_open)["stage 2"]
    found = planned(user, "--search", "reduce_bucket_size")["stage 2"]["reduce_bucket_size"]
    assert found[0] == "7e+06" and len(found) > 3


@pytest.mark.parametrize(
    ("tune", "slots", "stage", "values"),
    [
        ("zero_hpz_partition_size", 8, 3, ["1", "2", "4"]),
        ("tensor_parallel.autotp_size", 8, 1, ["1", "2", "4", "8"]),
        ("zero_quantized_weights", 2, 3, ["false", "true"]),
        ("stage3_module_granularity_threshold", 2, 3, None),
    ],
)
def test_what_changes_numbers_is_searched_only_when_asked_for(
    tmp_path: Path, tune: str, slots: int, stage: int, values: list[str] | None
) -> None:
    user = user_of(tmp_path, slots)
    assert tune not in planned(user)[f"stage {stage}"]
    found = planned(user, "--search", tune)[f"stage {stage}"]
    assert tune in found and values in (None, found[tune])


@pytest.mark.parametrize(
    ("config", "stage", "refuses"),
    [
        ({"optimizer": {"type": "Muon"}}, 3, True),
        ({"optimizer": {"type": "Muon"}}, 2, False),
        ({"prescale_gradients": True}, 2, True),
        ({"prescale_gradients": True}, 1, False),
        ({"gradient_predivide_factor": 2.0}, 3, True),
        ({"gradient_predivide_factor": 1.0}, 3, False),
    ],
)
def test_reduce_scatter_is_off_where_deepspeed_refuses_it(
    tmp_path: Path, config: dict[str, Any], stage: int, refuses: bool
) -> None:
    user = user_of(tmp_path, **config)
    options = ("--zero-stages", stage, "--search", "reduce_scatter", "--max-trials", 16)
    told = user.tunes(*options, "--finals", 0, method="random")
    assert searched(told)["reduce_scatter"] == ({"False"} if refuses else {"True", "False"})


# -- listed values and experiments


def test_an_experiment_lists_values_of_settings(tmp_path: Path) -> None:
    user = User(tmp_path, World(slots=2))
    zero = {"stage": {"type": "categorical", "vals": [1, 2]}, "overlap_comm": True}
    zero["reduce_bucket_size"] = {"type": "categorical", "vals": [1000000, 3000000]}
    own = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    parameters = {
        "deepspeed_config": "ds.json",
        "overwrite_deepspeed_args": {"zero_optimization": zero},
    }
    user.has(own, hyperparameters=parameters)
    told = user.tunes("--max-trials", 24, "--finals", 0, method="random", experiment=True)
    check_result(user, told)
    found = searched(told)
    assert found["stage"] == {"1", "2"} and found["reduce_bucket_size"] == {"1000000", "3000000"}
    assert "overlap_comm" not in found


# -- what trials get


@pytest.mark.parametrize("method", EACH_METHOD)
def test_trials_keep_what_the_user_set(tmp_path: Path, method: str) -> None:
    zero = {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 7700000}
    user = user_of(tmp_path, zero=zero, gradient_clipping=0.5)
    told = user.tunes("--max-trials", 14, "--finals", 0, method=method)
    check_result(user, told)
    for row in of_kind(told, "search"):
        changed = row["overrides"]["zero_optimization"]
        assert not {"overlap_comm", "reduce_bucket_size"} & set(changed)
    best = told.json["best_ds_config"]
    assert best["gradient_clipping"] == 0.5
    assert best["zero_optimization"]["reduce_bucket_size"] == 7700000


def test_switches_of_the_script_are_searched_beside_its_configuration(tmp_path: Path) -> None:
    user = User(tmp_path, World(slots=2, switches=SWITCHES))
    user.has()
    told = user.tunes("--max-trials", 30, "--finals", 0, "-z", 1, method="random")
    check_result(user, told)
    found = searched(told)
    assert "True" in found["gradient_checkpointing"] and "eager" in found["attn_implementation"]
    assert all("gradient_checkpointing" not in str(row["overrides"]) for row in told.trials)
    fixed = user.tunes(
        "--max-trials", 12, "--finals", 0, "--keep", "attn_implementation", "--run-dir", "fixed"
    )
    assert "attn_implementation" not in searched(fixed)


def test_listed_values_of_a_switch_are_the_only_ones(tmp_path: Path) -> None:
    user = User(tmp_path, World(slots=2))
    user.has()
    options = ("--vary", "--batch-size=4,8", "-z", 1, "--keep", "all")
    told = user.tunes("--max-trials", 12, "--finals", 0, *options, method="random")
    check_result(user, told)
    assert {"8"} <= searched(told)["--batch-size"] <= {"4", "8"}


OTHERS = [size for size in range(1, 1024) if size != 4]
FIXED = Failure("INVALID", {"micro_batch": OTHERS}, "feeds 4 samples", fixed_batch=4)


def tuned_from_4(user: User, *failures: Failure, trials: int, finals: int, method: str) -> Told:
    """Tune a script whose configuration has micro batch 4."""
    user.world = World(failures=failures)
    user.has({"train_micro_batch_size_per_gpu": 4})
    told = user.tunes("--max-trials", trials, "--finals", finals, method=method)
    assert told.status == 0, told.err
    return told


def ended_trials(user: User) -> list[tuple[dict[str, Any], str]]:
    """Return the trials in the order of their ends, each with the kind of its outcome."""
    events = user.events()
    trials = {e["trial"]["id"]: e["trial"] for e in events if e["event"] == "proposed"}
    ended = [e for e in events if e["event"] == "finished"]
    return [(trials[e["trial_id"]], e["outcome"]["kind"]) for e in ended]


@pytest.mark.parametrize("method", EACH_METHOD)
def test_a_script_that_feeds_a_fixed_batch_is_asked_for_another_once(
    user: User, method: str
) -> None:
    told = tuned_from_4(user, FIXED, trials=10, finals=0, method=method)
    sizes = [row["train_micro_batch_size_per_gpu"] for row in told.trials]
    assert len([size for size in sizes if size != 4]) <= 1 and len(sizes) > 3
    assert any(line.startswith("Micro batch: not searched") for line in told.json["verdict"])


@pytest.mark.parametrize("refusal", ["", "feeds 4 samples again", "its accumulation is constant"])
@pytest.mark.parametrize("method", EACH_METHOD)
def test_the_flag_of_a_fixed_batch_follows_the_micro_batch(
    user: User, method: str, refusal: str
) -> None:
    again = replace(FIXED, message=refusal, fixed_batch=None if "constant" in refusal else 4)
    failures = (replace(FIXED, batch_flag="--batch-size"), *([again] if refusal else []))
    told = tuned_from_4(user, *failures, trials=10, finals=2, method=method)
    ended = ended_trials(user)
    failed = [trial["batch_flag"] for trial, kind in ended if kind == "INVALID"]
    sizes = {trial["batch"]["micro_batch"] for trial, kind in ended if kind == "OK"}
    assert failed == (["", "--batch-size"] if refusal else [""])
    assert sizes == {4} if refusal else sizes > {4}
    size = user.best_config()["train_micro_batch_size_per_gpu"]
    needs = [line for line in told.json["verdict"] if f"needs --batch-size {size}" in line]
    assert bool(needs) is (size != 4)
    said = [line for line in told.json["verdict"] if line.startswith("Micro batch: not searched")]
    assert bool(said) == bool(refusal) and all(
        f"A trial with --batch-size failed: {refusal}" in x for x in said
    )


def test_the_flag_of_a_fixed_batch_is_used_if_the_users_own_batch_does_not_fit(user: User) -> None:
    """Otherwise the model would be said not to fit with any micro batch."""
    fixed = Failure(
        *("INVALID", {"batch_flag": ""}, "feeds 64 samples"), fixed_batch=64, batch_flag="--bs"
    )
    user.world = World(failures=(Failure("OOM", {"kind": "baseline"}), fixed))
    user.has({"train_micro_batch_size_per_gpu": 64})
    told = user.tunes("--max-trials", 6, "--finals", 0)
    assert told.status == 0, told.err
    rows = [(row["kind"], row["outcome"]) for row in told.trials]
    assert rows[:3] == [("baseline", "OOM"), ("profile", "INVALID"), ("profile", "OK")]
    assert told.json["best"]


def test_a_search_that_ends_before_it_could_use_a_flag_asks_for_more_trials(user: User) -> None:
    fixed = replace(FIXED, batch_flag="--bs")
    told = tuned_from_4(user, fixed, trials=2, finals=0, method="random")
    [said] = [line for line in told.json["verdict"] if "did not run" in line]
    assert said.endswith("set --bs: allow more trials (--max-trials)"), said


@pytest.mark.parametrize("method", EACH_METHOD)
def test_another_flag_is_tried_after_one_that_changes_nothing(user: User, method: str) -> None:
    """A flag with another value than the batch no longer hides the right flag."""
    flags = ("", "--pool-batch", "--batch-size")
    failures = [
        replace(FIXED, where={"micro_batch": OTHERS, "batch_flag": flag}, batch_flag=another)
        for flag, another in itertools.pairwise(flags)
    ]
    told = tuned_from_4(user, *failures, trials=10, finals=2, method=method)
    ended = ended_trials(user)
    ran = [trial for trial, kind in ended if kind == "OK"]
    assert [trial["batch_flag"] for trial, _ in ended[1:3]] == [*flags[:2]]
    assert {trial["batch_flag"] for trial in ran[1:]} == {flags[2]}
    assert len({trial["batch"]["micro_batch"] for trial in ran}) > 1
    assert not [line for line in told.json["verdict"] if line.startswith("Micro batch: not")]


@pytest.mark.parametrize("method", EACH_METHOD)
def test_a_flag_that_the_script_does_not_know_is_withdrawn(user: User, method: str) -> None:
    flag = "--batch-size"
    unknown = f"rank 0: train.py: error: unrecognized arguments: {flag} 16"
    where = {"micro_batch": OTHERS, "batch_flag": ""}
    failures = (
        replace(FIXED, where=where, batch_flag=flag),
        Failure("ERROR", {"batch_flag": flag}, unknown),
    )
    told = tuned_from_4(user, *failures, trials=10, finals=2, method=method)
    ended = ended_trials(user)
    ran = [trial for trial, kind in ended if kind == "OK"]
    assert [trial["batch_flag"] for trial, _ in ended].count(flag) == 1
    assert len(ran) > 1 and {trial["batch"]["micro_batch"] for trial in ran} == {4}
    assert f"note: trials no longer set {flag} to their micro batch" in told.err
    assert any(unknown in line for line in told.json["verdict"]), told.json["verdict"]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("method", EACH_METHOD)
def test_the_flag_of_the_accumulation_follows_it(user: User, method: str, is_known: bool) -> None:
    """Such a script plans its learning rate by the flag, so that it would end too early."""
    flag = "--grad_accum"
    unknown = f"rank 0: train.py: error: unrecognized arguments: {flag} 1"
    refused = Failure("ERROR", {"accumulation_flag": flag}, unknown)
    user.world = World(accumulation_flag=flag, failures=() if is_known else (refused,))
    user.has({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8})
    told = user.tunes("--max-trials", 10, "--train-batch-size", "own", method=method)
    assert told.status == 0, told.err
    assert f"note: from now on, trials set {flag} to their accumulation steps" in told.err
    assert (f"trials no longer set {flag}" in told.err) is not is_known
    gas = user.best_config()["gradient_accumulation_steps"]
    assert gas < 8
    needs = any(f"needs {flag} {gas}" in line for line in told.json["verdict"])
    assert needs is is_known


# Of a script that compares a flag with its configuration.
MISMATCH = Failure("ERROR", {"micro_batch": OTHERS}, "mismatch", batch_flag="--batch-size")


@pytest.mark.parametrize("with_flag", [False, True])
@pytest.mark.parametrize("method", EACH_METHOD)
def test_the_flag_that_kept_its_value_in_an_error_is_tried_once(
    user: User, method: str, with_flag: bool
) -> None:
    with_it = [replace(MISMATCH, batch_flag="")] if with_flag else []
    tuned_from_4(user, MISMATCH, *with_it, trials=10, finals=0, method=method)
    others = [
        (trial, kind) for trial, kind in ended_trials(user) if trial["batch"]["micro_batch"] != 4
    ]
    kinds = [kind for trial, kind in others if trial["batch_flag"]]
    if with_flag:
        assert len(kinds) == 1
    else:
        assert {*kinds} == {"OK"}
        assert [kind for _, kind in others].count("ERROR") == 1


def test_a_flag_that_no_trial_has_tried_is_named(user: User) -> None:
    told = tuned_from_4(user, MISMATCH, trials=2, finals=0, method="model")
    [advice] = [line for line in told.json["verdict"] if line.startswith("Micro batch: ")]
    assert "train_micro_batch_size_per_gpu=--batch-size" in advice


def test_no_flag_is_guessed_where_other_batches_run_without(user: User) -> None:
    failure = Failure("ERROR", {"trial": 3}, "crashed", batch_flag="--batch-size")
    tuned_from_4(user, failure, trials=8, finals=0, method="model")
    assert {trial["batch_flag"] for trial, _ in ended_trials(user)} == {""}
