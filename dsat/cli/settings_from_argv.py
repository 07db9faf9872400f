"""The command line as frozen, checked values."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from dsat.cli.parser import LAUNCHER_OPTIONS, LAUNCHER_SWITCHES, build_parser
from dsat.inputs.settings import ESTIMATE, RUN, SEARCH_OPTIONS, TUNE, EstimateSettings, Settings
from dsat.space.space import KNOB_NAMES


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
