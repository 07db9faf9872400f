"""What each key of DeepSpeed's `autotuning` section sets; an option overrides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed.autotuning import constants

from dsat.space.deepspeed_settings import SETTING_NAMES
from dsat.tuning import autotuning_section
from dsat.tuning.autotuning_section import KEYS, Section
from dsat.values.objective import METRIC_NAMES
from testing.scenarios import User
from testing.started import Told

MICRO = "train_micro_batch_size_per_gpu"
WITHOUT_EFFECT = (
    "metric_path",
    "model_info",
    "model_info_path",
    "min_train_batch_size",
    "overwrite",
)
MEANINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"enabled": True, "mp_size": 1, "num_nodes": 1}, {}),
    ({"metric": "fwd", "fast": False}, {"metric": "forward", "fast": False}),
    ({"start_profile_step": 4}, {"start_profile_step": 4, "end_profile_step": 8}),
    ({"end_profile_step": 15}, {"end_profile_step": 15}),
    ({"start_step": 5, "end_step": 10}, {"start_profile_step": 5, "end_profile_step": 10}),
    ({"tuner_type": " model_based "}, {"method": "model"}),
    ({"tuner_type": "gridsearch"}, {"method": "gridsearch"}),
    ({"max_train_batch_size": 1e3}, {"max_train_batch_size": 1000}),
    (
        {"tuner_num_trials": 10, f"max_{MICRO}": 900, f"min_{MICRO}": 2, "num_gpus": 2},
        {"max_trials": 11, "max_micro_batch": 900, "min_micro_batch": 2, "slots": 2},
    ),
    (
        {"arg_mappings": {f"{MICRO} ": " gas", "train_batch_size": None}},
        {"arg_mappings": {MICRO: "--gas"}},
    ),
    ({"arg_mappings": {MICRO: "-b"}}, {"arg_mappings": {MICRO: "-b"}}),
]


def read(section: Any, **config: Any) -> Section:
    found = autotuning_section.read({**config, "autotuning": section}, where="ds.json")
    assert found is not None
    return found


@pytest.mark.parametrize(("section", "meaning"), MEANINGS, ids=str)
def test_a_key_sets_a_setting(section: dict[str, Any], meaning: dict[str, Any]) -> None:
    assert read(section).values == meaning


def test_options_of_the_search_folders_and_notes() -> None:
    found = read({"tuner_early_stopping": 0, "num_tuning_micro_batch_sizes": 10})
    assert found.values == {"early_stopping": None, "num_micro_batches": 10}
    found = read({"results_dir": "out/results", "exps_dir": "/tmp/exps"})
    assert (found.results_dir, found.exps_dir) == (Path("out/results"), Path("/tmp/exps"))
    notes = read(dict.fromkeys(WITHOUT_EFFECT, "x")).notes
    assert [note.split()[1] for note in notes] == [
        f"autotuning.{k}"
        for k in sorted(WITHOUT_EFFECT, key=list(autotuning_section._WITHOUT_EFFECT).index)
    ]


def test_every_key_is_looked_at_here() -> None:
    here = {key for section, _ in MEANINGS for key in section} | {*WITHOUT_EFFECT}
    here |= {"tuner_early_stopping", "num_tuning_micro_batch_sizes"}
    assert here | {"results_dir", "exps_dir"} == KEYS


def test_every_key_and_metric_of_deepspeed_is_known() -> None:
    names = [
        name.removesuffix("_DEFAULT")
        for name in vars(constants)
        if name.startswith("AUTOTUNING_") and name.endswith("_DEFAULT")
    ]
    assert {getattr(constants, name) for name in names} | {constants.MODEL_INFO} <= KEYS
    assert set(autotuning_section._METRICS.values()) == set(METRIC_NAMES)


# -- in a search


def plan(user: User, section: dict[str, Any], *options: object, name: str = "tune") -> Any:
    config = {MICRO: 1, "autotuning": {"enabled": True, **section}}
    user.has(config)
    command = "train.py --deepspeed_config ds.json".split()
    told: Told = user.types(name, "--dry-run", "--json", *options, *command)
    assert told.status == 0, told.err
    return told.json["plan"]


def test_mappings_beside_the_section_have_no_effect_and_it_may_name_any_setting(user: User) -> None:
    section = {"enabled": True, "arg_mappings": {"lr": "learning_rate"}}
    user.has({MICRO: 1, "autotuning": section, "arg_mappings": {MICRO: "--b"}})
    words = "train.py --learning_rate 1e-3 --deepspeed_config ds.json"
    told = user.types("tune", "--max-trials", 2, "--finals", 0, *words.split())
    assert told.status == 0 and "arg_mappings has no effect" in told.err


def test_a_section_sets_defaults_wherever_it_is(user: User) -> None:
    section = {"tuner_type": "random", "metric": "latency", "tuner_num_trials": 9, "fast": True}
    for name in ("tune", "run"):
        found = plan(user, section, name=name)
        assert (found["method"], found["metric"]) == ("random", "latency")
        assert found["max_trials"] == 10 and set(found["fix"]) == set(SETTING_NAMES)
    user.has({MICRO: 1, "autotuning": section})
    found = user.types("tune", "deepspeed.yaml", ".", "--dry-run", "--json").json["plan"]
    assert (found["method"], found["metric"]) == ("random", "latency"), "an experiment's too"
    assert plan(user, section, name="asha")["method"] == "asha", "which was typed"


def test_what_is_typed_beats_the_section(user: User) -> None:
    section = {
        "tuner_type": "gridsearch",
        "tuner_early_stopping": 4,
        "metric": "latency",
        "max_train_batch_size": 64,
        "fast": True,
    }
    found = plan(user, section)
    assert found["search_options"].items() >= {"early_stopping": 4}.items()
    assert (found["max_train_batch_size"], found["train_batch_size"]) == (64, None)
    options = "--method model --metric throughput --train-batch-size 8 --search sub_group_size"
    found = plan(user, section, *options.split(), "--early-stopping", 7)
    assert (found["method"], found["metric"]) == ("model", "throughput")
    assert found["search_options"].items() >= {"early_stopping": 7, "stop_when": 0.003}.items()
    assert (found["max_train_batch_size"], found["train_batch_size"]) == (None, 8)
    assert "sub_group_size" not in found["fix"] and "overlap_comm" in found["fix"]


def test_what_a_section_does_not_say_is_as_in_any_search(user: User) -> None:
    unset, off = dict.fromkeys(KEYS), {"enabled": False, "tuner_type": "random", "fast": True}
    found, usual = plan(user, unset), plan(user, off)
    assert found == {**usual, "base_config": found["base_config"]}
    assert (found["method"], found["metric"], found["train_batch_size"]) == (
        "model",
        "throughput",
        1,
    )


def test_advice_names_the_key_of_the_section(user: User) -> None:
    user.has({MICRO: 1, "autotuning": {f"max_{MICRO}": 2, f"min_{MICRO}": 4}})
    told = user.types("tune", "train.py", "--deepspeed_config", "ds.json")
    assert told.status == 2 and f"ds.json: autotuning.max_{MICRO}" in told.err


@pytest.mark.parametrize("flag", [["--autotuning", "tune"], ["--autotuning=run"]])
def test_deepspeeds_own_flag_is_left_out(user: User, flag: list[str]) -> None:
    user.has({MICRO: 1})
    command = ["deepspeed", *flag, "--num_gpus", "1", "train.py", "--deepspeed_config", "ds.json"]
    told = user.types("tune", "--dry-run", "--json", *command)
    assert told.status == 0, told.err
    assert told.json["command"][-3:] == ["train.py", "--deepspeed_config", "ds.json"]


def test_a_scripts_flag_of_the_same_name_is_its_own(user: User) -> None:
    user.has({MICRO: 1})
    command = "deepspeed --num_gpus 1 train.py --deepspeed_config ds.json --autotuning tune"
    told = user.types("tune", "--dry-run", "--json", *command.split())
    assert told.json["command"][-2:] == ["--autotuning", "tune"]
