"""The command line as frozen, checked values."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from dsat.cli import completion
from dsat.cli.parser import LAUNCHER_OPTIONS, LAUNCHER_SWITCHES, build_parser
from dsat.engines import places
from dsat.errors import UserInputError
from dsat.inputs.estimate_settings import ESTIMATE, EstimateSettings
from dsat.inputs.look_settings import LOOK_SETTINGS, LookSettings
from dsat.inputs.option import options_of
from dsat.inputs.settings import RUN, TUNE, Settings
from dsat.search import options_of as options_of_search
from dsat.space.knobs import KNOB_NAMES


def parse(argv: Sequence[str]) -> Settings | EstimateSettings | LookSettings:
    """The settings of a command line; leaves with status 2 and one line if it is wrong."""
    own_argv, command = list(argv), []
    if "--" in own_argv and own_argv[0] not in (TUNE, RUN):
        position = own_argv.index("--")
        own_argv, command = own_argv[:position], own_argv[position + 1 :]
    parser = build_parser()
    completion.answer(parser)
    values = vars(parser.parse_args(own_argv))
    if values["method"] in LOOK_SETTINGS:
        return _look_settings(parser, values)
    if values["method"] in (TUNE, RUN):
        command = _launcher_command(values)
        values["run_full_experiment"] = values["method"] == RUN
    else:
        _check_target(parser, values, command)
    values["command"] = tuple(command)
    settings = EstimateSettings if values["method"] == ESTIMATE else Settings
    for own in options_of(settings):
        if own.many and values.get(own.name) is not None:
            values[own.name] = own.collect(values[own.name], KNOB_NAMES)
    if settings is EstimateSettings:
        del values["method"]
        try:
            return EstimateSettings(**values)
        except UserInputError as error:
            parser.error(str(error))
    own_options = options_of_search(values["method"])
    search_options = {parameter: values.pop(own.keyword) for parameter, own in own_options.items()}
    of_places = {own.keyword: values.pop(own.keyword, None) for own in places.options()}
    try:
        place_options = places.given_options(of_places, values.get("engine", places.AUTO))
        return Settings(**values, search_options=search_options, place_options=place_options)
    except UserInputError as error:
        parser.error(str(error))


def _look_settings(parser: argparse.ArgumentParser, values: dict[str, Any]) -> LookSettings:
    settings = LOOK_SETTINGS[values.pop("method")]
    if isinstance(values.get("runs"), list):
        values["runs"] = tuple(values["runs"])
    try:
        found: LookSettings = settings(**values)
    except UserInputError as error:
        parser.error(str(error))
    return found


def _check_target(
    parser: argparse.ArgumentParser, values: Mapping[str, Any], command: Sequence[str]
) -> None:
    """Leaves with one line unless there is either an experiment or a command."""
    if command:
        if values["config"] is not None:
            parser.error(f"{values['config']} and a command after -- cannot both be tuned")
        if values["include"]:
            parser.error("--include is for an experiment configuration, not for a command after --")
    elif values.get("hf_config") is not None:
        return  # the settings themselves know what goes with it
    elif values["model_dir"] is None:
        parser.error("what to tune is missing: CONFIG MODEL_DIR, or -- COMMAND")
    elif values["ds_config"] is not None:
        parser.error(
            "--ds-config is for a command after --; in an experiment configuration it is "
            "hyperparameters.deepspeed_config"
        )


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
