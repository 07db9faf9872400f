"""What every key of the native autotuner's section means, and what is said when it is wrong."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from deepspeed.autotuning import constants
from deepspeed.autotuning.config import DeepSpeedAutotuningConfig

from dsat.errors import UserInputError
from dsat.inputs import autotuning_section
from dsat.inputs.autotuning_section import KEYS, Autotuning
from dsat.values.objective import METRIC_NAMES

DEFAULTS = Autotuning()


def read(section: Any, **config: Any) -> Autotuning:
    return autotuning_section.read({**config, "autotuning": section}, where="ds.json")


def changed(section: Any) -> dict[str, Any]:
    """The fields in which a section differs from the defaults."""
    found = read(section)
    names = [field.name for field in fields(Autotuning)]
    return {n: getattr(found, n) for n in names if getattr(found, n) != getattr(DEFAULTS, n)}


# -- every accepted key

MEANINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"enabled": True}, {}),
    ({"metric": "FLOPS"}, {"metric": "FLOPS_per_gpu"}),
    ({"metric": "fwd"}, {"metric": "forward"}),
    ({"metric": "bwd"}, {"metric": "backward"}),
    ({"start_profile_step": 4}, {"start_profile_step": 4, "end_profile_step": 8}),
    ({"start_step": 4}, {"start_profile_step": 4, "end_profile_step": 8}),
    ({"end_profile_step": 15}, {"end_profile_step": 15}),
    ({"start_step": 5, "end_step": 10}, {"start_profile_step": 5, "end_profile_step": 10}),
    ({"fast": False}, {"fast": False}),
    ({"tuner_type": " gridsearch "}, {}),
    ({"tuner_type": "random"}, {"method": "random"}),
    ({"tuner_type": "model_based"}, {"method": "model"}),
    ({"tuner_early_stopping": 0}, {"early_stopping": 0}),
    ({"tuner_early_stopping": None}, {"early_stopping": 0}),
    ({"tuner_num_trials": 10}, {"max_trials": 10}),
    ({"max_train_batch_size": 1024}, {"max_train_batch_size": 1024}),
    ({"max_train_batch_size": 1e3}, {"max_train_batch_size": 1000}),
    ({"min_train_batch_size": 8}, {"min_train_batch_size": 8}),
    ({"max_train_micro_batch_size_per_gpu": 900}, {"max_micro_batch": 900}),
    ({"min_train_micro_batch_size_per_gpu": 2}, {"min_micro_batch": 2}),
    ({"num_tuning_micro_batch_sizes": 10}, {"num_micro_batches": 10}),
    ({"mp_size": 1}, {}),
    (
        {"arg_mappings": {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"}},
        {"arg_mappings": {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"}},
    ),
    (
        {"arg_mappings": {"gradient_accumulation_steps ": " gas", "train_batch_size": None}},
        {"arg_mappings": {"gradient_accumulation_steps": "--gas"}},
    ),
    (
        {"arg_mappings": {"train_micro_batch_size_per_gpu": "-b"}},
        {"arg_mappings": {"train_micro_batch_size_per_gpu": "-b"}},
    ),
    ({"results_dir": "out/results"}, {"results_dir": Path("out/results")}),
    ({"exps_dir": "/tmp/exps"}, {"exps_dir": Path("/tmp/exps")}),
    ({"overwrite": True}, {"overwrite": True}),
    ({"num_gpus": [2]}, {"num_gpus": 2}),
    ({"num_nodes": [1]}, {}),
    (
        {"enabled": False},
        {"notes": ("ds.json: autotuning.enabled: false has no effect: you asked for tuning",)},
    ),
    (
        {"metric_path": "metrics.json"},
        {
            "notes": (
                "ds.json: autotuning.metric_path has no effect: every trial reports to dsat itself",
            )
        },
    ),
    (
        {"model_info": {"profile": True}, "model_info_path": "info.json"},
        {
            "notes": (
                "ds.json: autotuning.model_info has no effect: dsat always profiles the model "
                "itself",
                "ds.json: autotuning.model_info_path has no effect: dsat always profiles the model "
                "itself",
            )
        },
    ),
]


@pytest.mark.parametrize(("section", "meaning"), MEANINGS, ids=[str(s) for s, _ in MEANINGS])
def test_every_key_has_its_meaning(section: dict[str, Any], meaning: dict[str, Any]) -> None:
    before = copy.deepcopy(section)
    assert changed(section) == meaning
    assert section == before, "the argument is not changed"


def test_every_key_is_in_the_table() -> None:
    assert {key for section, _ in MEANINGS for key in section} == KEYS


@pytest.mark.parametrize("config", [{}, {"autotuning": {}}, {"autotuning": None}])
def test_defaults(config: dict[str, Any]) -> None:
    assert autotuning_section.read(config, where="ds.json") == DEFAULTS


@pytest.mark.parametrize("key", sorted(KEYS - {"tuner_early_stopping"}))
def test_null_is_not_given(key: str) -> None:
    assert changed({key: None}) == {}


def test_every_key_of_deepspeed_is_known_and_its_defaults_are_ours() -> None:
    native = {
        name.removeprefix("AUTOTUNING_").removesuffix("_DEFAULT"): value
        for name, value in vars(constants).items()
        if name.startswith("AUTOTUNING_") and name.endswith("_DEFAULT")
    }
    keys = {getattr(constants, f"AUTOTUNING_{name}") for name in native} | {constants.MODEL_INFO}
    assert keys <= KEYS
    theirs = DeepSpeedAutotuningConfig({"autotuning": {}})
    same = {name: getattr(theirs, name) for name in vars(DEFAULTS) if hasattr(theirs, name)}
    same |= {
        "method": theirs.tuner_type,
        "early_stopping": theirs.tuner_early_stopping,
        "max_train_batch_size": theirs.max_train_batch_size or 0,
        "max_trials": theirs.tuner_num_trials,
        "max_micro_batch": theirs.max_train_micro_batch_size_per_gpu,
        "min_micro_batch": theirs.min_train_micro_batch_size_per_gpu,
        "num_micro_batches": theirs.num_tuning_micro_batch_sizes,
        "results_dir": Path(theirs.results_dir),
        "exps_dir": Path(theirs.exps_dir),
        "arg_mappings": theirs.arg_mappings or {},
    }
    assert same.pop("overwrite") is True, "which deletes earlier results: not one of ours"
    assert same.pop("end_profile_step") == 5, "of 3 steps, too few for an interval"
    assert same == {name: getattr(DEFAULTS, name) for name in same}
    unlike = {"notes", "overwrite", "end_profile_step", "num_gpus"}
    assert set(same) == set(vars(DEFAULTS)) - unlike


def test_every_metric_is_one_of_ours() -> None:
    assert set(autotuning_section._METRICS.values()) == set(METRIC_NAMES)


def test_mappings_outside_of_the_section_get_a_note() -> None:
    config = {"arg_mappings": {"train_micro_batch_size_per_gpu": "--b"}, "autotuning": {}}
    found = autotuning_section.read(config, where="ds.json")
    assert found.arg_mappings == {}
    assert found.notes == ("ds.json: arg_mappings has no effect: it belongs inside autotuning",)


def test_a_mapping_may_name_any_setting_that_the_configuration_has() -> None:
    found = read({"arg_mappings": {"lr": "learning_rate"}}, optimizer={"params": {"lr": 1e-3}})
    assert found.arg_mappings == {"lr": "--learning_rate"}


# -- every error

ERRORS: list[tuple[Any, str]] = [
    ([], "ds.json: autotuning: must be a mapping, not []"),
    (
        {"tuner_typ": "random"},
        "ds.json: autotuning.tuner_typ: there is no autotuning setting 'tuner_typ'. Did you mean "
        "'tuner_type'? Correct it or leave it out.",
    ),
    (
        {"metric": "latencies"},
        "ds.json: autotuning.metric: must be one of throughput, latency, FLOPS, flops, "
        "FLOPS_per_gpu, tokens_per_second, forward, fwd, backward, bwd, step, not 'latencies'. "
        "Did you mean 'latency'?",
    ),
    (
        {"tuner_type": "xgboost"},
        "ds.json: autotuning.tuner_type: must be one of gridsearch, random, model_based, not "
        "'xgboost'",
    ),
    (
        {"mp_size": 2},
        "ds.json: autotuning.mp_size: model parallel jobs cannot be tuned, and mp_size is 2. Set "
        "it to 1 if the model is not split over GPUs.",
    ),
    (
        {"num_nodes": 2},
        "ds.json: autotuning.num_nodes: trials run on one machine, not on 2. Set it to 1.",
    ),
    (
        {"num_gpus": [1, 2]},
        "ds.json: autotuning.num_gpus: lists several numbers, and one run searches with one of "
        "them. Run the command once for each.",
    ),
    ({"num_gpus": 0}, "ds.json: autotuning.num_gpus: must be a positive integer, not 0"),
    ({"num_gpus": [1, "2"]}, "ds.json: autotuning.num_gpus: must be a positive integer, not '2'"),
    (
        {"num_gpus": []},
        "ds.json: autotuning.num_gpus: is an empty list. Give at least one value, or leave it out.",
    ),
    ({"fast": 1}, "ds.json: autotuning.fast: must be true or false, not 1"),
    ({"enabled": "yes"}, "ds.json: autotuning.enabled: must be true or false, not 'yes'"),
    ({"overwrite": "false"}, "ds.json: autotuning.overwrite: must be true or false, not 'false'"),
    ({"results_dir": ""}, "ds.json: autotuning.results_dir: must be the path of a folder, not ''"),
    ({"exps_dir": 3}, "ds.json: autotuning.exps_dir: must be the path of a folder, not 3"),
    (
        {"arg_mappings": ["--b"]},
        "ds.json: autotuning.arg_mappings: must be a mapping from settings to flags, not ['--b']",
    ),
    (
        {"arg_mappings": {"train_micro_batch_size": "--b"}},
        "ds.json: autotuning.arg_mappings.train_micro_batch_size: the configuration has no setting "
        "'train_micro_batch_size'. Did you mean 'train_micro_batch_size_per_gpu'? Correct it or "
        "leave it out.",
    ),
    *(
        (
            {"arg_mappings": {"train_batch_size": flag}},
            "ds.json: autotuning.arg_mappings.train_batch_size: must be a flag of the training "
            f'script, not {flag!r}. For example "--per_device_train_batch_size".',
        )
        for flag in (3, "", " -- ", "--b 3", True)
    ),
    (
        {"arg_mappings": {"train_batch_size": "--a", "train_batch_size ": "b"}},
        "ds.json: autotuning.arg_mappings.train_batch_size: is mapped twice, to --a and to --b",
    ),
]
WHOLE_NUMBERS = (
    "start_profile_step start_step end_profile_step end_step tuner_num_trials mp_size "
    "min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu "
    "num_tuning_micro_batch_sizes"
).split()
ERRORS += [
    ({key: value}, f"ds.json: autotuning.{key}: must be a positive integer, not {value!r}")
    for key in WHOLE_NUMBERS
    for value in (True, "3", 0)
]
ERRORS += [
    ({key: value}, f"ds.json: autotuning.{key}: must be an integer of at least 0, not {value!r}")
    for key in ("tuner_early_stopping", "max_train_batch_size")
    for value in (True, -1)
]


@pytest.mark.parametrize(("section", "line"), ERRORS, ids=[str(s) for s, _ in ERRORS])
def test_every_mistake_is_one_line(section: Any, line: str) -> None:
    with pytest.raises(UserInputError) as caught:
        read(section)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"num_nodes": 1}, 4),
        ({"num_gpus": 2}, 2),
        ({"num_gpus": {"type": "categorical", "vals": [1]}}, 1),
    ],
)
def test_slots(section: dict[str, Any], expected: int) -> None:
    assert read(section).slots_of(4, where="ds.json") == expected


def test_no_more_slots_than_there_are() -> None:
    with pytest.raises(UserInputError) as caught:
        read({"num_gpus": 8}).slots_of(4, where="ds.json")
    assert str(caught.value) == (
        "ds.json: autotuning.num_gpus: asks for 8 slots, but only 4 are available. Ask for fewer."
    )
