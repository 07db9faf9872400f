"""The options, their defaults and types, and what `--help` says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsat.app.keywords import search_settings
from dsat.cli import settings_from_argv
from dsat.inputs.estimate_settings import EstimateSettings
from dsat.inputs.option import options_of
from dsat.inputs.settings import Settings
from dsat.search import SEARCHES

# Those of Determined's dsat, whose users rely on them.
DEFAULTS: dict[str, Any] = {
    "max_trials": 50,
    "max_slots": None,
    "max_concurrent_trials": 16,
    "metric": "FLOPS_per_gpu",
    "run_full_experiment": False,
    "include": (),
    "zero_stages": None,
    "start_profile_step": 3,
    "seed": 42,
    "search_runner_config": None,
    "max_search_runner_restarts": 5,
}
OWN: dict[str, dict[str, Any]] = {
    "asha": {"max_rungs": 5, "min_trials": 3, "early_stopping": 0, "divisor": 2},
    "binary": {"search_range_factor": None},
    "random": {"trials_per_config": 5, "early_stopping": None, "search_range_factor": None},
    "gridsearch": {"num_micro_batches": None, "early_stopping": None},
    "model": {"stop_when": 0.003, "early_stopping": None},
}


def parse(*argv: str) -> Settings:
    chosen = settings_from_argv.parse([*argv])
    assert isinstance(chosen, Settings)
    return chosen


def test_an_estimate_has_settings_of_its_own() -> None:
    words = "estimate --slot-memory 1GiB 24GiB --slots 8 --exact --ds-config d.json -- train.py -x"
    assert settings_from_argv.parse(words.split()) == EstimateSettings(
        config=None,
        model_dir=None,
        command=("train.py", "-x"),
        ds_config=Path("d.json"),
        include=(),
        slot_memories=(2**30, 24 * 2**30),
        slot_counts=(8,),
        exact=True,
        json=False,
    )


@pytest.mark.parametrize("method", SEARCHES)
def test_defaults(method: str) -> None:
    found = parse(method, "a.yaml", ".")
    assert vars(found).items() >= DEFAULTS.items()
    assert found.search_options.items() >= OWN[method].items()


def test_flags_and_keywords_make_the_same_settings() -> None:
    given: dict[str, Any] = {
        "max_trials": "7",
        "max_slots": "4",
        "max_concurrent_trials": "2",
        "slots": "2",
        "metric": "latency",
        "zero_stages": ["3", "0", "3"],
        "include": ["x", "y"],
        "start_profile_step": "2",
        "end_profile_step": "4",
        "max_profile_steps": "9",
        "random_seed": "1",
        "train_batch_size": "64",
        "divisible_by": "8",
        "trial_timeout": "10m",
        "slot_memory": "24GiB",
        "engine": "local",
        "run_dir": "r",
        "tune": ["overlap_comm", "offload_optimizer"],
        "fix": ["sub_group_size"],
        "nvme_path": "/nvme",
        "min_micro_batch": "2",
        "max_micro_batch": "32",
        "memory_model": "none",
        "arg_mapping": ["train_micro_batch_size_per_gpu=batch-size"],
        "max_rungs": "3",
        "divisor": "4",
        "search_range_factor": "1.5",
    }
    words = ["asha", "a.yaml", "m", "--resume", "--cold"]
    for key, value in given.items():
        words += [f"--{key.replace('_', '-')}", *([value] if isinstance(value, str) else value)]
    chosen = parse(*words)
    keywords_given = {**given, "resume": True, "cold": True}
    by_keywords = search_settings("a.yaml", "m", "asha", None, keywords_given, engines=())
    assert chosen == by_keywords
    assert (chosen.max_trials, chosen.zero_stages, chosen.run_dir) == (7, (3, 0), Path("r"))
    assert (chosen.trial_timeout_s, chosen.slot_memory_bytes) == (600.0, 24 * 2**30)
    assert chosen.arg_mappings == {"train_micro_batch_size_per_gpu": "--batch-size"}
    assert chosen.search_options.items() >= {"max_rungs": 3, "search_range_factor": 1.5}.items()


@pytest.mark.parametrize("method", SEARCHES)
def test_help_tells_every_option_and_its_default(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(method, "--help")
    assert stop.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"dsat {method} CONFIG MODEL_DIR [OPTIONS]" in said  # -z would take them after it
    options = [*options_of(Settings), *SEARCHES[method].options.values()]
    for flag in [flag for own in options for flag in own.flags]:
        assert flag in said
    for default in ("(default: 50)", "(default: 16)", "(default: 42)", "(default: 30m)"):
        assert default in said
    assert "(default: 0 1 2 3, or those that your configuration lists)" in said
    assert "%%" not in said


def test_an_option_that_is_given_twice_has_all_its_values() -> None:
    chosen = parse(
        *"model --arg-mapping a=--x --arg-mapping b=--y -z 1 -z 2 --tune x --tune y z".split(),
        *"--switch optim=a,b --switch optim=c --switch --n=1 --switch --fast -- train.py".split(),
    )
    assert chosen.arg_mappings == {"a": "--x", "b": "--y"}
    assert (chosen.zero_stages, chosen.tune) == ((1, 2), ("x", "y", "z"))
    assert chosen.listed_switches == {
        "optim": ("a", "b", "c"),
        "--n": ("1",),
        "--fast": (False, True),
    }
    files = parse("model", "--switch", "optim=a", "exp.yaml", ".")
    assert (files.listed_switches, files.config) == ({"optim": ("a",)}, Path("exp.yaml"))
    words = parse("asha", "--slots", "2", "--", "train.py", "--", "-z", "9")
    assert (words.command, words.slots) == (("train.py", "--", "-z", "9"), 2)


# -- a command in place of an experiment configuration, and the commands of DeepSpeed's autotuner


@pytest.mark.parametrize(
    ("name", "words", "command"),
    [
        ("tune", "train.py", "deepspeed train.py"),
        ("run", "--num_gpus 2 train.py -z 3", "deepspeed --num_gpus 2 train.py -z 3"),
        ("tune", "--module a.b --json --cold", "deepspeed --module a.b --json --cold"),
        ("tune", "train.py --switch --foo", "deepspeed train.py --switch --foo"),
        ("tune", "-i localhost:0 --json train.py", "deepspeed --include localhost:0 train.py"),
    ],
)
def test_the_commands_of_deepspeeds_autotuner(name: str, words: str, command: str) -> None:
    chosen = parse(name, *words.split())
    assert chosen.command == tuple(command.split())
    assert chosen.run_full_experiment is (name == "run")
    assert chosen.json is ("--json train.py" in words)
    assert chosen.max_trials == 50 and chosen.search_options == {}


def test_fewer_steps_than_usual_take_one_option() -> None:
    settings = parse("asha", "d.yaml", ".", "--max-profile-steps", "3")
    assert (settings.start_profile_step, settings.end_profile_step) == (3, 5)
