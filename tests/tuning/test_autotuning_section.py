"""What every key of the native autotuner's section means, and what is said when it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed.autotuning import constants
from deepspeed.autotuning.config import DeepSpeedAutotuningConfig

from dsat.tuning import autotuning_section
from dsat.tuning.autotuning_section import KEYS, Autotuning
from dsat.values.objective import METRIC_NAMES

DEFAULTS = Autotuning()
MICRO = "train_micro_batch_size_per_gpu"


def read(section: Any, **config: Any) -> Autotuning:
    return autotuning_section.read({**config, "autotuning": section}, where="ds.json")


def changed(section: Any) -> dict[str, Any]:
    """The fields in which a section differs from the defaults."""
    own = vars(DEFAULTS)
    return {name: value for name, value in vars(read(section)).items() if value != own[name]}


NO_EFFECT = {
    "enabled": False,
    "metric_path": "metrics.json",
    "model_info": {"profile": True},
    "model_info_path": "info.json",
}
MEANINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"enabled": True, "mp_size": 1, "num_nodes": 1, "tuner_type": " gridsearch "}, {}),
    ({"metric": "fwd", "fast": False}, {"metric": "forward", "fast": False}),
    ({"start_profile_step": 4}, {"start_profile_step": 4, "end_profile_step": 8}),
    ({"end_profile_step": 15}, {"end_profile_step": 15}),
    ({"start_step": 5, "end_step": 10}, {"start_profile_step": 5, "end_profile_step": 10}),
    ({"tuner_type": "model_based"}, {"method": "model"}),
    ({"tuner_early_stopping": None}, {"early_stopping": 0}),
    ({"max_train_batch_size": 1e3}, {"max_train_batch_size": 1000}),
    (
        {
            "tuner_early_stopping": 0,
            "tuner_num_trials": 10,
            "min_train_batch_size": 8,
            f"max_{MICRO}": 900,
            f"min_{MICRO}": 2,
            "num_tuning_micro_batch_sizes": 10,
            "num_gpus": 2,
        },
        {
            "early_stopping": 0,
            "max_trials": 10,
            "min_train_batch_size": 8,
            "max_micro_batch": 900,
            "min_micro_batch": 2,
            "num_micro_batches": 10,
            "num_gpus": 2,
        },
    ),
    (
        {"arg_mappings": {f"{MICRO} ": " gas", "train_batch_size": None}},
        {"arg_mappings": {MICRO: "--gas"}},
    ),
    ({"arg_mappings": {MICRO: "-b"}}, {"arg_mappings": {MICRO: "-b"}}),
    (
        {"results_dir": "out/results", "exps_dir": "/tmp/exps", "overwrite": True},
        {
            "results_dir": Path("out/results"),
            "exps_dir": Path("/tmp/exps"),
            "overwrite": True,
        },
    ),
    (
        NO_EFFECT,
        {
            "notes": (
                "ds.json: autotuning.enabled: false has no effect: you asked for tuning",
                "ds.json: autotuning.metric_path has no effect: every trial reports to dsat itself",
                *(
                    f"ds.json: autotuning.{key} has no effect: dsat always profiles the model "
                    "itself"
                    for key in ("model_info", "model_info_path")
                ),
            )
        },
    ),
]


@pytest.mark.parametrize(("section", "meaning"), MEANINGS, ids=str)
def test_every_key_has_its_meaning(section: dict[str, Any], meaning: dict[str, Any]) -> None:
    assert changed(section) == meaning


def test_every_key_is_in_the_table() -> None:
    assert {key for section, _ in MEANINGS for key in section} == KEYS


def test_null_is_not_given() -> None:
    assert autotuning_section.read({}, where="ds.json") == read({}) == read(None) == DEFAULTS
    assert changed(dict.fromkeys(KEYS - {"tuner_early_stopping"})) == {}


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
    assert set(autotuning_section._METRICS.values()) == set(METRIC_NAMES)


def test_what_a_mapping_may_name() -> None:
    config = {"arg_mappings": {MICRO: "--b"}, "autotuning": {}}
    found = autotuning_section.read(config, where="ds.json")
    assert found.arg_mappings == {}
    assert found.notes == ("ds.json: arg_mappings has no effect: it belongs inside autotuning",)
    found = read({"arg_mappings": {"lr": "learning_rate"}}, optimizer={"params": {"lr": 1e-3}})
    assert found.arg_mappings == {"lr": "--learning_rate"}, "any setting of the configuration"
