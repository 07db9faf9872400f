"""The command line as frozen, checked values."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.cli.parser import ESTIMATE, LAUNCHER_OPTIONS, LAUNCHER_SWITCHES, RUN, TUNE, build_parser
from dsat.space.space import KNOB_NAMES

# Each method's own options: flag -> the search's parameter.
SEARCH_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "asha": {
        "max_rungs": "max_rungs",
        "min_binary_search_trials": "min_trials",
        "asha_early_stopping": "early_stopping",
        "divisor": "divisor",
        "search_range_factor": "search_range_factor",
    },
    "binary": {"search_range_factor": "search_range_factor"},
    "random": {
        "trials_per_random_config": "trials_per_config",
        "early_stopping": "early_stopping",
    },
    "gridsearch": {
        "num_micro_batches": "num_micro_batches",
        "early_stopping": "early_stopping",
    },
    "model": {
        "stop_when": "stop_when",
        "early_stopping": "early_stopping",
    },
}


@dataclass(frozen=True)
class Settings:
    """What the user asked for; see `--help` for each."""

    method: str
    config: Path | None
    model_dir: Path | None
    command: tuple[str, ...]
    ds_config: Path | None
    include: tuple[Path, ...]
    max_trials: int
    max_slots: int | None
    max_concurrent_trials: int
    metric: str
    run_full_experiment: bool
    zero_stages: tuple[int, ...] | None
    tune: tuple[str, ...]
    fix: tuple[str, ...]
    memory_model: str
    nvme_path: str | None
    arg_mappings: Mapping[str, str]
    start_profile_step: int
    end_profile_step: int
    max_profile_steps: int
    random_seed: int
    search_runner_config: Path | None
    max_search_runner_restarts: int
    detach: bool
    train_batch_size: int | None
    max_train_batch_size: int | None
    min_micro_batch: int
    max_micro_batch: int | None
    divisible_by: int
    slots: int | None
    trial_timeout_s: float
    slot_memory_bytes: int | None
    engine: str
    cold: bool
    run_dir: Path | None
    resume: bool
    dry_run: bool
    json: bool
    search_options: Mapping[str, Any]


@dataclass(frozen=True)
class EstimateSettings:
    """What the user asked of `dsat estimate`.

    Attributes:
        slot_memories: memory of a slot, in bytes; one column of the table for each.
        slot_counts: numbers of data-parallel slots; a table for each.
        exact: every line of the tables is simulated.
    """

    config: Path | None
    model_dir: Path | None
    command: tuple[str, ...]
    ds_config: Path | None
    include: tuple[Path, ...]
    slot_memories: tuple[int, ...]
    slot_counts: tuple[int, ...]
    exact: bool
    json: bool


def parse(argv: Sequence[str]) -> Settings | EstimateSettings:
    """The settings of a command line; leaves with status 2 and one line if it is wrong."""
    words, command = list(argv), []
    if "--" in words and words[0] not in (TUNE, RUN):
        position = words.index("--")
        words, command = words[:position], words[position + 1 :]
    parser = build_parser()
    values = vars(parser.parse_args(words))
    if values["method"] in (TUNE, RUN):
        command = _launcher_command(values)
        values = {**_defaults(), **values, "run_full_experiment": values["method"] == RUN}
    else:
        _check_target(parser, values, command)
    values["command"] = tuple(command)
    values["include"] = tuple(values["include"])
    if values["method"] == ESTIMATE:
        del values["method"]
        for key in ("slot_memories", "slot_counts"):
            values[key] = tuple(values[key])
        return EstimateSettings(**values)
    _check(parser, values)
    options = SEARCH_OPTIONS.get(values["method"], {})
    search_options = {parameter: values.pop(flag) for flag, parameter in options.items()}
    if values["zero_stages"] is not None:
        values["zero_stages"] = tuple(dict.fromkeys(values["zero_stages"]))
    for key in ("tune", "fix"):
        names = KNOB_NAMES if "all" in values[key] else values[key]
        values[key] = tuple(dict.fromkeys(names))
    values["arg_mappings"] = dict(values["arg_mappings"])
    return Settings(**values, search_options=search_options)


def _check_target(
    parser: argparse.ArgumentParser, values: Mapping[str, Any], command: Sequence[str]
) -> None:
    """Leaves with one line unless there is either an experiment or a command."""
    if command:
        if values["config"] is not None:
            parser.error(f"{values['config']} and a command after -- cannot both be tuned")
        if values["include"]:
            parser.error("--include is for an experiment configuration, not for a command after --")
    elif values["model_dir"] is None:
        parser.error("what to tune is missing: CONFIG MODEL_DIR, or -- COMMAND")
    elif values["ds_config"] is not None:
        parser.error(
            "--ds-config is for a command after --; in an experiment configuration it is "
            "hyperparameters.deepspeed_config"
        )


def _check(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> None:
    """Leaves with one line if options contradict each other."""
    start, end = values["start_profile_step"], values["end_profile_step"]
    if end < start:
        parser.error(f"--end-profile-step {end} is before --start-profile-step {start}")
    measured = end - start + 1
    if values["max_profile_steps"] < measured:
        parser.error(
            f"--max-profile-steps {values['max_profile_steps']} is less than the {measured} steps "
            "from --start-profile-step to --end-profile-step"
        )
    both = set(values["tune"]) & set(values["fix"])
    if both:
        parser.error(f"{', '.join(sorted(both))} cannot be given to both --tune and --fix")
    largest = values["max_micro_batch"]
    if largest is not None and largest < values["min_micro_batch"]:
        parser.error(
            f"--max-micro-batch {largest} is less than --min-micro-batch "
            f"{values['min_micro_batch']}"
        )
    if values["train_batch_size"] is not None and values["max_train_batch_size"] is not None:
        parser.error("--train-batch-size and --max-train-batch-size exclude each other")


def _launcher_command(values: dict[str, Any]) -> list[str]:
    """The launcher's command line, its options taken out of `values`."""
    command = ["deepspeed"]
    for flag in LAUNCHER_SWITCHES:
        if values.pop(flag[2:]):
            command.append(flag)
    for flag in LAUNCHER_OPTIONS:
        given = values.pop(flag[2:])
        if given is not None:
            command += [flag, given]
    return [*command, values.pop("script"), *values.pop("args")]


def _defaults() -> dict[str, Any]:
    """What a search's options are when none is given."""
    values = vars(build_parser().parse_args(["binary", "-", "-"]))
    for name in ("config", "model_dir", *SEARCH_OPTIONS["binary"]):
        values.pop(name)
    return {**values, "config": None, "model_dir": None}
