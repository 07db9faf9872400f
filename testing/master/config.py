"""Experiment configurations with the master's defaults, and hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML

from testing.master.errors import invalid

Json = dict[str, Any]
_TYPES = ("const", "int", "double", "log", "categorical")


def complete(text: str, checkpoints: str) -> Json:
    """Return a submitted configuration with the defaults of the master.

    Args:
        text: The configuration in YAML.
        checkpoints: The cluster's folder for checkpoints.
    """
    user = YAML(typ="safe", pure=True).load(text)
    config = _merged(_defaults(), user)
    kept = {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1}
    storage = user.get("checkpoint_storage") or {"type": "shared_fs", "host_path": checkpoints}
    config["checkpoint_storage"] = {**kept, **storage}
    config["hyperparameters"] = normalized(user.get("hyperparameters") or {})
    config["name"] = user.get("name") or "Experiment (stand-in)"
    return config


def normalized(hyperparameters: Mapping[str, Any]) -> Json:
    """Return hyperparameters as the master stores them: each constant becomes `{"type":
    "const"}`."""
    return {name: _normalized(value) for name, value in hyperparameters.items()}


def point_of(hyperparameters: Mapping[str, Any]) -> Json:
    """Return the first point of a normalized hyperparameter space."""
    return {name: _first(value) for name, value in hyperparameters.items()}


def _normalized(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return {"type": "const", "val": value}
    if "type" not in value:
        return normalized(value)
    if value["type"] not in _TYPES:
        raise invalid(f"unknown hyperparameter type {value['type']!r}")
    return dict(value)


def _first(value: Any) -> Any:
    if not isinstance(value.get("type"), str):
        return point_of(value)
    if value["type"] == "const":
        return value["val"]
    return value["vals"][0] if value["type"] == "categorical" else value["minval"]


def _merged(below: Json, above: Json) -> Json:
    result = dict(below)
    for key, value in above.items():
        nested = isinstance(value, dict) and isinstance(below.get(key), dict)
        result[key] = _merged(below[key], value) if nested else value
    return result


def _defaults() -> Json:
    return {
        "checkpoint_policy": "best",
        "data": {},
        "debug": False,
        "description": "",
        "environment": {"environment_variables": {"cpu": [], "cuda": [], "rocm": []}},
        "hyperparameters": {},
        "labels": [],
        "max_restarts": 5,
        "min_checkpoint_period": {"batches": 0},
        "min_validation_period": {"batches": 0},
        "optimizations": {
            "aggregation_frequency": 1,
            "average_aggregated_gradients": True,
            "average_training_metrics": True,
            "gradient_compression": False,
            "mixed_precision": "O0",
        },
        "perform_initial_validation": False,
        "profiling": {"enabled": False, "begin_on_batch": 0, "sync_timings": True},
        "project": "",
        "records_per_epoch": 0,
        "reproducibility": {"experiment_seed": 1},
        "resources": {"resource_pool": "default", "slots_per_trial": 1},
        "scheduling_unit": 100,
        "searcher": {"smaller_is_better": True},
        "workspace": "",
    }
