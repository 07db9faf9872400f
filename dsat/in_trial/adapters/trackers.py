"""Trackers of experiments, which record nothing in trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsat.in_trial import config_injection
from dsat.in_trial.adapters import calls
from dsat.in_trial.adapters.calls import Original
from dsat.in_trial.adapters.trial import RunningTrial

# Variables that turn trackers off. MLflow has none, so it writes into the trial's folder.
TRACKERS_OFF: Mapping[str, str] = {
    "WANDB_MODE": "disabled",  # docs.wandb.ai: environment variables
    "COMET_MODE": "disabled",  # read by transformers and by comet_ml.start
    "COMET_START_ONLINE": "0",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "TRACKIO_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",  # transformers' own
}
# Sections of a DeepSpeed configuration that report, or slow down what they report (`deepspeed/
# monitor/config.py`, `profiling/config.py`, `comm/config.py`; 0.19.8), and single switches.
_SECTIONS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger")
_SWITCHES = ("wall_clock_breakdown", "memory_breakdown", "dump_state")


def variables_off(folder: Path) -> dict[str, str]:
    """Return the variables with which no tracker writes anywhere but into a trial's folder."""
    return {**TRACKERS_OFF, "MLFLOW_TRACKING_URI": _mlflow_folder(folder)}


def _mlflow_folder(folder: Path) -> str:
    return (folder / "mlruns").resolve().as_uri()


def disable_reports(arguments: dict[str, Any]) -> None:
    """Have an engine monitor, profile and print nothing.

    In place: the script may yet read its batch size from its configuration.
    """
    passed = config_injection.passed_config(arguments)
    if passed is None:
        return
    config, off = passed.content, dict[str, Any]()
    for name in _SECTIONS:
        if isinstance(config.get(name), Mapping) and config[name].get("enabled"):
            off[name] = {**config[name], "enabled": False}
    off.update({name: False for name in _SWITCHES if config.get(name)})
    if not off:  # DeepSpeed itself reads a file that needs no change
        return
    config.update(off)
    if arguments.get(passed.name) is not config:  # it is a file's
        arguments.update({**config_injection.drop_config(arguments), "config": config})


def log_in_trial(name: str) -> Callable[..., Any]:
    """Return a wrapper of a writer's constructor, whose first argument names a folder."""

    def write_to_trial(
        trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any
    ) -> Any:
        """Write to the trial's folder."""
        assert trial.folder is not None
        folder = str(trial.folder / "tensorboard")
        return calls.call_with(original, name, 0, folder, args, kwargs)

    return write_to_trial


def connect_client(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Write to the trial's folder."""
    assert trial.folder is not None
    folder = _mlflow_folder(trial.folder)
    return calls.call_with(original, "tracking_uri", 0, folder, args, kwargs)


def set_address(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Do nothing: runs are written to the trial's folder."""


def start_run(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Track nothing."""
    return original(*args, **{**kwargs, "mode": "disabled"})


def run_hydra(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Make the output folder in the trial's."""
    assert trial.folder is not None
    overrides = [*kwargs["overrides"], f"hydra.run.dir={trial.folder / 'hydra'}"]
    return original(*args, **{**kwargs, "overrides": overrides})
