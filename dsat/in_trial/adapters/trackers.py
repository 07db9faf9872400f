"""Adapters of experiment trackers: in trials, these write to the trial's folder or nowhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsat.in_trial import config_injection
from dsat.in_trial.adapters.calls import Call

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
# Sections of a DeepSpeed configuration that report or profile (deepspeed/monitor/config.py,
# profiling/config.py, comm/config.py; 0.19.8), and single settings that do so.
_SECTIONS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger")
_SWITCHES = ("wall_clock_breakdown", "memory_breakdown", "dump_state")


def variables_off(folder: Path) -> dict[str, str]:
    """Return environment variables that keep trackers from writing outside of a trial's folder."""
    return {**TRACKERS_OFF, "MLFLOW_TRACKING_URI": _mlflow_folder(folder)}


def _mlflow_folder(folder: Path) -> str:
    return (folder / "mlruns").resolve().as_uri()


def disable_reports(arguments: dict[str, Any]) -> None:
    """Disable an engine's monitors, profilers and printed reports.

    A dict is changed in place, because the script may read it later.
    """
    original = config_injection.passed_config(arguments)
    if original is None:
        return
    config, disabled = original.content, dict[str, Any]()
    for name in _SECTIONS:
        if isinstance(config.get(name), Mapping) and config[name].get("enabled"):
            disabled[name] = {**config[name], "enabled": False}
    disabled.update({name: False for name in _SWITCHES if config.get(name)})
    if not disabled:  # DeepSpeed itself reads a file that needs no change
        return
    config.update(disabled)
    if arguments.get(original.name) is not config:  # the content of a file
        arguments.update({**config_injection.drop_config(arguments), "config": config})


def log_in_trial(name: str) -> Callable[..., Any]:
    """Return a wrapper for a writer's constructor, whose first argument names a folder."""

    def write_to_trial(call: Call) -> Any:
        """Write logs to the trial's folder."""
        assert call.trial.folder is not None
        return call.replace(name, 0, str(call.trial.folder / "tensorboard")).proceed()

    return write_to_trial


def connect_client(call: Call) -> Any:
    """Write runs to the trial's folder."""
    assert call.trial.folder is not None
    return call.replace("tracking_uri", 0, _mlflow_folder(call.trial.folder)).proceed()


def set_address(_: Call) -> None:
    """Do nothing: runs are written to the trial's folder."""


def start_run(call: Call) -> Any:
    """Disable the run, so that nothing is tracked."""
    return call.proceed_with(*call.args, **{**call.kwargs, "mode": "disabled"})


def run_hydra(call: Call) -> Any:
    """Put Hydra's output folder into the trial's folder."""
    assert call.trial.folder is not None
    # In quotes, because Hydra's grammar gives a meaning to many characters: `,` starts a sweep.
    folder = str(call.trial.folder / "hydra").replace("'", r"\'")
    folders = [f"hydra.{kind}.dir='{folder}'" for kind in ("run", "sweep")]
    overrides = [*call.kwargs["overrides"], *folders]
    return call.proceed_with(*call.args, **{**call.kwargs, "overrides": overrides})
