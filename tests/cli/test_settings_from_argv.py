"""The options as `--help` tells them, and the words of the command line as the API's keywords."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from dsat.cli.parser import options_of_command
from dsat.search import SEARCHES
from testing.scenarios import Told, User

# Those of Determined's dsat, whose users rely on them.
DEFAULTS: dict[str, dict[str, Any]] = {
    "asha": {"max_rungs": 5, "min_trials": 3, "early_stopping": 0, "divisor": 2},
    "binary": {"search_range_factor": None},
    "random": {"trials_per_config": 5, "early_stopping": None, "search_range_factor": None},
    "gridsearch": {"num_micro_batches": None, "early_stopping": None},
    "model": {"stop_when": 0.003, "early_stopping": None},
}


def plan(user: User, *words: object) -> dict[str, Any]:
    told: Told = user.types(*words, "--dry-run", "--json")
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
    assert f"dsat {method} CONFIG MODEL_DIR [OPTIONS]" in said  # -z would take them after it
    for flag in [flag for own in options_of_command(method) for flag in own.flags]:
        assert flag in said
    for default in (50, 16, 42, "30m"):
        assert f"(default: {default})" in said
    assert "%%" not in said


def test_an_option_that_is_given_twice_has_all_its_values(user: User) -> None:
    words = "model --zero-stages 1 --zero-stages 2 --tune overlap_comm --tune sub_group_size"
    more = "--switch optim=a,b --switch optim=c --switch --n=1 --switch --fast"
    found = plan(user, *words.split(), *more.split(), "deepspeed.yaml", ".")
    assert (found["zero_stages"], found["tune"]) == ([1, 2], ["overlap_comm", "sub_group_size"])
    assert found["listed_switches"] == {
        "optim": [None, "a", "b", "c"],
        "--n": [None, "1"],
        "--fast": [False, True],
    }


def test_words_after_the_command_are_the_scripts(user: User) -> None:
    command = "python3 train.py --deepspeed_config ds.json -- -z 9".split()
    told = user.types("asha", "--dry-run", "--json", "--", *command)
    assert told.json["command"][-3:] == ["--", "-z", "9"]
    assert told.json["plan"]["zero_stages"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("words", "script"),
    [
        ("tune train.py DS", []),
        ("run --num_gpus 1 train.py DS -z 3", ["-z", "3"]),
        ("tune train.py DS --switch --foo", ["--switch", "--foo"]),
        ("tune -i localhost:0 --json train.py DS", []),
    ],
)
def test_the_commands_of_deepspeeds_autotuner(user: User, words: str, script: list[str]) -> None:
    given = words.replace("DS", "--deepspeed_config ds.json").split()
    at = given.index("train.py")
    told = user.types(*given[:at], "--dry-run", "--json", *given[at:])
    assert told.status == 0, told.err
    command = told.json["command"]
    assert command[command.index("ds.json") + 1 :] == script
    assert told.json["plan"]["method"] == "gridsearch"
    assert told.json["plan"]["max_trials"] == 52, "50, the user's own, and the finals"


def test_the_help_imports_little() -> None:
    code = (
        "import sys; from dsat.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    )
    code += "\nprint(sorted({'torch', 'deepspeed', 'rich'} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(told.stdout.splitlines()[-1].replace("'", '"')) == []
