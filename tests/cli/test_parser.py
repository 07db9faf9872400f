"""The options in `--help`, and the command line's arguments as keywords of the API."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from dsat.cli.parser import options_of_command
from dsat.search import SEARCHES
from testing.scenarios import User
from testing.started import Told

# Defaults of Determined's dsat, on which its users rely.
DEFAULTS: dict[str, dict[str, Any]] = {
    "asha": {"max_rungs": 5, "min_trials": 3, "early_stopping": 0, "divisor": 2},
    "binary": {"search_range_factor": None},
    "random": {"trials_per_config": 5, "early_stopping": None, "search_range_factor": None},
    "gridsearch": {"num_micro_batches": None, "early_stopping": None},
    "model": {"stop_when": 0.003, "early_stopping": None},
}


def plan(user: User, *words: object) -> dict[str, Any]:
    told: Told = user.types(words[0], "--dry-run", "--json", *words[1:])
    assert told.status == 0, told.err
    found = told.json["plan"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("method", SEARCHES)
def test_defaults(user: User, method: str) -> None:
    found = plan(user, method, "deepspeed.yaml", ".")
    assert (found["max_trials"], found["metric"], found["seed"]) == (50, "FLOPS_per_gpu", 42)
    assert found["measured"]["steps"][0] == 3 and found["finals"] is None
    assert found["search_options"].items() >= DEFAULTS[method].items()


@pytest.mark.parametrize("method", SEARCHES)
def test_help_tells_every_option_and_its_default(user: User, method: str) -> None:
    told = user.types(method, "--help")
    said = " ".join(told.out.split())
    assert told.status == 0 and told.err == ""
    assert f"dsat {method} [OPTIONS] COMMAND..." in said
    assert f"dsat {method} CONFIG.yaml FOLDER [OPTIONS]" in said
    for flag in [flag for own in options_of_command(method) for flag in own.flags]:
        assert flag in said
    for default in (50, 16, 42, "30m"):
        assert f"(default: {default})" in said
    assert "%%" not in said


def test_an_option_that_is_given_twice_has_all_its_values(user: User) -> None:
    words = "model --zero-stages 1 --zero-stages 2 --search overlap_comm --search sub_group_size"
    more = "--vary optim=a,b --vary optim=c --vary --n=1 --vary --fast"
    found = plan(user, *words.split(), *more.split(), "deepspeed.yaml", ".")
    assert (found["zero_stages"], found["tune"]) == ([1, 2], ["overlap_comm", "sub_group_size"])
    assert found["listed_switches"] == {
        "optim": [None, "a", "b", "c"],
        "--n": [None, "1"],
        "--fast": [False, True],
    }


COMMAND = "python3 train.py --deepspeed_config ds.json -z 9 --max-trials 3".split()


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--",
        "-z 1 --no-fork",
        "-z 1 2",
        "-z 1 2 --",
        "--search overlap_comm sub_group_size",
        "--vary --workers=0,4",
        "--vary optim=a,b --keep all",
        "--max-trials=5",
        "--slots 1 -mt 5",
    ],
)
@pytest.mark.parametrize("name", ["tune", "asha"])
def test_the_command_begins_at_the_first_word_that_is_no_option(
    user: User, name: str, options: str
) -> None:
    told = user.types(name, "--dry-run", "--json", *options.split(), *COMMAND)
    assert told.status == 0, told.err
    assert told.json["command"][-4:] == ["-z", "9", "--max-trials", "3"]
    if "-z" in options:
        assert told.json["plan"]["zero_stages"] == ([1, 2] if "2" in options else [1])


def test_tune_keeps_the_batch_and_the_methods_have_their_ancestors_defaults(user: User) -> None:
    own = plan(user, "tune", *COMMAND)
    assert (own["method"], own["metric"], own["train_batch_size"]) == ("model", "throughput", 1)
    other = plan(user, "tune", "--method", "asha", *COMMAND)
    for key in ("metric", "train_batch_size", "max_trials", "zero_stages", "finals"):
        assert other[key] == own[key], key
    assert other["method"] == "asha" and "max_rungs" in other["search_options"]
    assert plan(user, "tune", "--train-batch-size", "any", *COMMAND)["train_batch_size"] is None
    filled = plan(user, "tune", "--max-train-batch-size", 64, *COMMAND)
    assert (filled["max_train_batch_size"], filled["train_batch_size"]) == (64, None)
    free = plan(user, "model", *COMMAND)
    assert (free["metric"], free["train_batch_size"]) == ("FLOPS_per_gpu", None)


def test_an_experiment_has_its_folder_and_options_on_either_side(user: User) -> None:
    usual = plan(user, "tune", "--method", "random", "-z", 1, 2, "deepspeed.yaml", ".")
    assert usual["zero_stages"] == [1, 2] and usual["method"] == "random"
    assert plan(user, "tune", "deepspeed.yaml", "-z", 1, 2, "--method", "random") == usual
    assert plan(user, "tune", "deepspeed.yaml", ".", "--method", "random", "-z", 1, 2) == usual


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("deepspeed train.py", "dsat tune deepspeed"),
        ("tune --gpus 3 train.py", "--gpus"),
        ("tune --search overlapcomm train.py", "overlap_comm"),
        ("tune --max-tr 3 train.py", "--max-tr"),
        ("tune --max-trails 3 train.py", "--max-trials"),
        ("tune -z 0 7 train.py", "7 (choose from"),
        ("tune deepspeed train.py --dry-run", "before the command"),
        ("tune --ds-config ds.json deepspeed.yaml .", "--ds-config"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(user: User, words: str, said: str) -> None:
    told = user.types(*words.split())
    assert told.status == 2 and said in told.err.splitlines()[-1]


def test_a_setting_that_cannot_be_searched_is_named(user: User) -> None:
    for setting, is_named in (("zero_quantized_weights", True), ("contiguous_gradients", False)):
        words = ("--dry-run", "-z", 1, "--search", setting, "deepspeed.yaml", ".")
        told = user.types("tune", *words)
        assert told.status == 0 and (f"{setting} cannot be searched" in told.out) is is_named


def test_the_help_fits_on_a_screen(user: User) -> None:
    told = user.types("--help")
    assert len(told.out.splitlines()) <= 40
    names = "tune run estimate project show compare runs export watch doctor".split()
    listed = [line.split()[0] for line in told.out.splitlines() if line.startswith("    ")]
    assert [name for name in listed if name in names] == names


def test_the_help_imports_little() -> None:
    code = (
        "import sys; from dsat.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    )
    code += "\nprint(sorted({'torch', 'deepspeed', 'rich'} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(told.stdout.splitlines()[-1].replace("'", '"')) == []
