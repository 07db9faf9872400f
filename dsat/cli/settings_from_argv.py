"""The command line as frozen, checked values."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsat.cli.parser import (
    LAUNCHER_OPTIONS,
    METHODS,
    PREDICTS,
    build_parser,
    options_of_command,
)
from dsat.command.entrypoint import DEEPSPEED_SWITCHES
from dsat.errors import UserInputError
from dsat.inputs.estimate_settings import EstimateSettings
from dsat.inputs.project_settings import ProjectSettings
from dsat.options import options_of
from dsat.show.settings import READ_ONLY, ReadOnlySettings
from dsat.tuning import keywords
from dsat.tuning.settings import RUN, TUNE, Settings

AnySettings = Settings | EstimateSettings | ProjectSettings | ReadOnlySettings

_OF_MODEL = (
    "{flag} is an option of dsat model -- COMMAND; dsat {method} takes bounds from section "
    "autotuning of the DeepSpeed configuration (tuner_num_trials and others)"
)


def parse(argv: Sequence[str]) -> AnySettings:
    """Return the settings of a command line; exit with status 2 and one line if it is wrong."""
    own_argv, command = list(argv), []
    if "--" in own_argv and own_argv[0] not in (TUNE, RUN):
        position = own_argv.index("--")
        own_argv, command = own_argv[:position], own_argv[position + 1 :]
    own_argv = _with_joined_switches(own_argv)
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    if own_argv and own_argv[0] not in METHODS and _is_program(own_argv[0]):
        parser.error(f"to tune a command, write it behind --: dsat model -- {own_argv[0]} ...")
    if command and not own_argv:
        parser.error(f"what to do with it is missing: dsat model -- {command[0]} ...")
    namespace, unknown = parser.parse_known_args(own_argv)
    values = vars(namespace)
    target = values.get("config")
    if target is not None and not command and _is_program(str(target)):
        parser.error(f"a command comes after --: dsat {values['method']} -- {target} ...")
    if unknown:
        flag = unknown[0].partition("=")[0]
        if values["method"] in (TUNE, RUN) and any(
            flag in own.flags for own in options_of_command("model")
        ):
            parser.error(_OF_MODEL.format(flag=flag, method=values["method"]))
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return _settings(values, command)
    except UserInputError as error:
        parser.error(str(error))


def _with_joined_switches(words: Sequence[str]) -> list[str]:
    """Join `--switch --flag=...` to one word: argparse would take the flag for an option.

    An option of the command itself stays one.
    """
    options = options_of_command(words[0]) if words and words[0] in METHODS else []
    flags = {"-h", "--help"}.union(*(own.flags for own in options))
    found: list[str] = []
    for word in words:
        is_switch = word.startswith("-") and word.partition("=")[0] not in flags
        if is_switch and "--switch" in flags and found and found[-1] == "--switch":
            found[-1] = f"--switch={word}"
        else:
            found.append(word)
    return found


def _settings(values: dict[str, Any], command: list[str]) -> AnySettings:
    method = values["method"]
    if method in READ_ONLY:
        del values["method"]
        values = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return READ_ONLY[method](**values)
    if method in (TUNE, RUN):
        command = _launcher_command(values)
        values["run_full_experiment"] = method == RUN
    else:
        _check_target(values, command)
    values["command"] = tuple(command)
    predicts = PREDICTS.get(method)
    for own in options_of(predicts or Settings):
        given = values.get(own.name)
        if own.many:
            values[own.name] = own.initial if given is None else own.collect(given)
    if predicts is not None:
        del values["method"]
        return predicts(**values)
    return keywords.settings_of(values)


def _check_target(values: Mapping[str, Any], command: Sequence[str]) -> None:
    """Raise UserInputError unless there is either an experiment or a command."""
    if command:
        if values["config"] is not None:
            raise UserInputError(f"{values['config']} and a command after -- cannot both be tuned")
        if values["include"]:
            raise UserInputError(
                "--include is for an experiment configuration, not for a command after --"
            )
    elif values.get("hf_config") is not None:
        return  # the settings themselves know what goes with it
    elif values["model_dir"] is None:
        method = values["method"]
        others = "a yaml file and its folder"
        others = f", {others}, or --hf-config" if method in PREDICTS else f", or {others}"
        raise UserInputError(f"the script is missing: give -- COMMAND{others}")
    elif values["ds_config"] is not None:
        raise UserInputError(
            "--ds-config is for a command after --; in an experiment configuration it is "
            "hyperparameters.deepspeed_config"
        )


def _is_program(word: str) -> bool:
    return word.endswith(".py") or (not Path(word).is_file() and shutil.which(word) is not None)


def _launcher_command(values: dict[str, Any]) -> list[str]:
    """Return the launcher's command line, and take its options out of `values`."""
    command = ["deepspeed"]
    for flag in DEEPSPEED_SWITCHES:
        if values.pop(flag[2:]):
            command.append(flag)
    for flag in LAUNCHER_OPTIONS:
        given = values.pop(flag[2:])
        if given is not None:
            command += [flag, given]
    script = values.pop("script")
    if not script.endswith(".py") and _is_program(script):
        raise UserInputError(
            f"{values['method']} takes a script and its arguments, as deepspeed --autotuning does; "
            f"for a whole command: dsat model -- {script} ..."
        )
    return [*command, script, *values.pop("args")]
