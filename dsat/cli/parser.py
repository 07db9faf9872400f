"""The parser of the command line, made of the declared options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dsat import __version__
from dsat.command.entrypoint import DEEPSPEED_SWITCHES
from dsat.engines import places
from dsat.inputs.estimate_settings import ESTIMATE, EstimateSettings
from dsat.inputs.project_settings import PROJECT, ProjectSettings
from dsat.options import SWITCH, WORD, Group, Option, options_of
from dsat.search import SEARCHES
from dsat.show.settings import READ_ONLY
from dsat.tuning.keywords import help_of
from dsat.tuning.settings import RUN, TUNE, Settings

# Options of the deepspeed launcher with a value (deepspeed/launcher/runner.py, 0.19.8).
LAUNCHER_OPTIONS = """
    --hostfile --include --exclude --num_nodes --min_elastic_nodes --max_elastic_nodes --num_gpus
    --num_accelerators --node_rank --master_port --master_addr --launcher --launcher_args
    --bind_core_list --enable_each_rank_log --ssh_port --venv_script --log_level
""".split()
NUM_GPUS = Option(
    ("--num_gpus",),
    "slots of each trial (default: autotuning.num_gpus, or all of this machine or of the hostfile)",
    kind=WORD,
    metavar="N",
)
_LAUNCHER_SHORT = {"--hostfile": "-H", "--include": "-i", "--exclude": "-e"}
# Commands that predict, by name.
PREDICTS: Mapping[str, type[EstimateSettings | ProjectSettings]] = {
    ESTIMATE: EstimateSettings,
    PROJECT: ProjectSettings,
}
METHODS = (*SEARCHES, TUNE, RUN, *PREDICTS, *READ_ONLY)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """A formatter that shows defaults, but not where there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, (), argparse.SUPPRESS) or action.nargs == "+":
            return action.help
        return super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="dsat",
        description="Finds the DeepSpeed configuration with which a training script runs fastest, "
        "by running short trials of it.",
        epilog="Examples: dsat model -- deepspeed train.py --deepspeed_config ds.json | "
        "dsat estimate -- deepspeed train.py --deepspeed_config ds.json | dsat doctor",
    )
    parser.add_argument("--version", action="version", version=f"dsat {__version__}")
    metavar = f"{{{','.join(METHODS)}}}"
    commands = parser.add_subparsers(dest="method", required=True, metavar=metavar)
    for name, search in SEARCHES.items():
        command = _command(commands, name, search.summary)
        _add_target(command, name)
        _add_grouped(command, options_of_command(name))
    for name, what in ((TUNE, "tunes"), (RUN, "tunes, then trains with the best configuration")):
        description = (
            f"in place of `deepspeed --autotuning {name} SCRIPT ARGS`: {what}, as the autotuning "
            "section of the script's DeepSpeed configuration says"
        )
        _add_native(_command(commands, name, description), name)
    for name, settings in PREDICTS.items():
        command = _command(commands, name, settings.summary)
        _add_target(command, name)
        _add(command, options_of_command(name))
    for name, look in READ_ONLY.items():
        command = _command(commands, name, look.summary)
        if look.argument is not None:
            argument, attributes = look.argument
            command.add_argument(argument, type=Path, **attributes)
        _add(command, options_of_command(name))
    return parser


def options_of_command(name: str) -> list[Option]:
    """Return the declared options of one of `METHODS`."""
    if name in SEARCHES:
        return [*places.complete(options_of(Settings)), *SEARCHES[name].options.values()]
    if name in (TUNE, RUN):
        return [NUM_GPUS, *(own for own in options_of(Settings) if own.any_command)]
    return list(options_of({**PREDICTS, **READ_ONLY}[name]))


def _command(commands: Any, name: str, description: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=description, description=description, formatter_class=_Help
    )
    return parser


def _add_target(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the arguments of a command that takes an experiment, or a command after `--`."""
    parser.usage = (
        f"dsat {name} CONFIG MODEL_DIR [OPTIONS]\n"
        f"       dsat {name} [OPTIONS] [--ds-config FILE] -- COMMAND"
    )
    said = {"config": "experiment configuration", "model_dir": "folder with the training script"}
    for dest, text in said.items():
        parser.add_argument(dest, type=Path, nargs="?", metavar=dest.upper(), help=text)


def _add_native(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the arguments of `deepspeed --autotuning tune|run`."""
    for flag in DEEPSPEED_SWITCHES:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    for flag in LAUNCHER_OPTIONS:
        if flag not in NUM_GPUS.flags:
            short = [_LAUNCHER_SHORT[flag]] if flag in _LAUNCHER_SHORT else []
            parser.add_argument(*short, flag, help=argparse.SUPPRESS)
    _add(parser, options_of_command(name))
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments"
    )


def _add_grouped(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add options under their headings; the most used come first."""
    listed = list(options)
    for group in Group:
        own = [option for option in listed if option.group is group]
        if own:
            _add(parser.add_argument_group(group.value), own)


def _add(parser: argparse._ActionsContainer, options: Iterable[Option]) -> None:
    for own in options:
        dest = own.name or own.keyword
        if own.kind is None:
            parser.add_argument(*own.flags, dest=dest, action="store_true", help=own.help)
            continue
        parser.add_argument(
            *own.flags,
            dest=dest,
            type=_argparse_type(own.kind.read),
            nargs=None if not own.many else 1 if own.kind is SWITCH else "+",
            action="extend" if own.many else "store",
            choices=own.choices,
            default=None if own.many else own.default,
            metavar=own.placeholder,
            help=help_of(own),
        )


def _argparse_type(read: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Return a reader for argparse, which shows messages of its own error only."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
