"""Parser of the command line: it makes settings from the declared options."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsat import __version__
from dsat.command.ds_config import did_you_mean
from dsat.errors import UserInputError
from dsat.estimating.options import EstimateSettings
from dsat.options import SWITCH, Group, Option, options_of
from dsat.prepare.target import names_experiment
from dsat.projecting.options import ProjectSettings
from dsat.search import SEARCHES
from dsat.show.settings import READ_ONLY, ReadOnlySettings
from dsat.tuning.command_line import CommandLine
from dsat.tuning.make_settings import all_options, make_settings
from dsat.tuning.settings import RUN, TUNE, Settings

AnySettings = Settings | EstimateSettings | ProjectSettings | ReadOnlySettings

# Settings classes of the commands that predict, by command.
PREDICTS: Mapping[str, type[EstimateSettings | ProjectSettings]] = {
    "estimate": EstimateSettings,
    "project": ProjectSettings,
}
TUNES: Mapping[str, str] = {
    TUNE: "find the fastest DeepSpeed configuration for a training command",
    RUN: "tune, then train with the best configuration",
}
METHODS = (*TUNES, *PREDICTS, *READ_ONLY, *SEARCHES)
_DRY_RUN = "--dry-run"
_EPILOG = f"""\
Short forms: dsat {"|".join(SEARCHES)} = dsat tune --method NAME, with
the FLOPS_per_gpu metric and, unless your configuration gives a train_batch_size, a free global
batch size, as in Determined's dsat.

Examples:
  dsat tune deepspeed train.py --deepspeed_config ds.json
  dsat tune deepspeed.yaml .
  dsat estimate --model config.json"""


def parse(argv: Sequence[str]) -> tuple[AnySettings, CommandLine]:
    """Parse a command line; if it is wrong, print usage and error, and exit with status 2."""
    if "_ARGCOMPLETE" in os.environ:  # the shell wants completions
        import argcomplete

        argcomplete.autocomplete(build_parser())
    if argv[:1] == ["--"]:
        argv = argv[1:]
    name, words = (argv[0], list(argv[1:])) if argv else ("", [])
    parser = build_parser(name)
    if name not in METHODS and _is_program(name):
        parser.error(f"there is no command {name!r}. To tune a training: dsat {TUNE} {name} ...")
    if name not in METHODS and (hint := did_you_mean(name, METHODS).strip()):
        parser.error(f"there is no command {name!r}. {hint}")
    if name in READ_ONLY or name not in METHODS:
        values = vars(parser.parse_args(argv))
        return _look_settings(parser, values), CommandLine(name, tuple(words))
    options = options_of_command(name)
    is_separated = "--" in words
    words, target_words = split(words, options)
    is_experiment = bool(target_words) and names_experiment(target_words[0])
    if not is_separated and not is_experiment:
        if _DRY_RUN in target_words:
            parser.error(f"{_DRY_RUN} comes before the command: dsat {name} {_DRY_RUN} ...")
        _note_options_of_command(target_words, options)
    if is_experiment:
        is_folder = len(target_words) > 1 and not target_words[1].startswith("-")
        end = 2 if is_folder else 1
        words, target_words = [*words, *target_words[end:]], target_words[:end]
    namespace, unknown = parser.parse_known_args([name, *_join_switches(words, options)])
    if unknown:
        if unknown[0] == "--":
            parser.error(
                f"{target_words[0]} and a command cannot both be tuned. Remove one of them."
            )
        flags = [flag for each in options for flag in each.flags]
        hint = did_you_mean(unknown[0].partition("=")[0], flags, 0.75).strip()
        parser.error(
            f"dsat {name} has no option {unknown[0]}; see `dsat {name} --help`. {hint}".strip()
        )
    values = vars(namespace)
    del values["command_name"]
    try:
        settings = _settings(name, options, values, _target(target_words, is_experiment))
    except UserInputError as error:
        parser.error(str(error))
    return settings, CommandLine(name, tuple(words), tuple(target_words), is_experiment)


def _note_options_of_command(words: Sequence[str], options: Iterable[Option]) -> None:
    """Print a note for each word of the user's command that looks like a common dsat option."""
    ours = {flag for each in options if each.group is Group.FIRST for flag in each.flags}
    for word in words:
        if word.startswith("--") and word.partition("=")[0] in ours:
            note = (
                f"note: {word} is passed to your command. Put options of dsat before the command."
            )
            print(note, file=sys.stderr)


def split(words: Sequence[str], options: Iterable[Option]) -> tuple[list[str], list[str]]:
    """Split words into options and the target.

    The target begins after `--`, or at the first word that is neither an option nor its value. An
    unknown word that begins with a dash counts as an option, so that the parser refuses it.
    """
    by_flag = {flag: each for each in options for flag in (*each.flags, *each.old)}
    position = 0
    while position < len(words) and words[position].startswith("-"):
        word = words[position]
        if word == "--":
            return list(words[:position]), list(words[position + 1 :])
        flag, has_value, _ = word.partition("=")
        declared = by_flag.get(flag)
        position += 1
        if declared is None or declared.kind is None or has_value:
            continue
        position += 1
        while position < len(words) and (
            declared.takes(words[position]) or (declared.many and words[position].isdecimal())
        ):
            position += 1
    return list(words[:position]), list(words[position:])


def _target(words: Sequence[str], is_experiment: bool) -> dict[str, Any]:
    if not is_experiment:
        return {"command": tuple(words)} if words else {}
    config = Path(words[0])
    return {"config": config, "model_dir": Path(words[1]) if len(words) > 1 else config.parent}


def _settings(
    name: str, options: Sequence[Option], values: dict[str, Any], target: Mapping[str, Any]
) -> Settings | EstimateSettings | ProjectSettings:
    by_name = {each.name or each.keyword: each for each in options}
    given = {key: by_name[key].flags[-1] for key in values}
    for key, value in values.items():
        kind = by_name[key].kind
        if by_name[key].many and kind is not None:
            values[key] = kind.collect(value)
    _check_target(name, values, target)
    if name in PREDICTS:
        return PREDICTS[name](**target, **values)
    if name in SEARCHES:
        values["method"], given["method"] = name, f"dsat {name}"
    if name == RUN:
        values["run_full_experiment"] = True
    return make_settings({**target, **values}, given, keeps_batch=name in TUNES)


def _check_target(name: str, values: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Raise UserInputError if the target is missing, or an option does not apply to its kind."""
    if "command" in target and values.get("include"):
        raise UserInputError(
            "works only with an experiment configuration", where="--add-files", hint="Remove it."
        )
    if "config" in target and values.get("ds_config") is not None:
        raise UserInputError(
            "works only with a command",
            where="--ds-config",
            hint="In an experiment configuration, set hyperparameters.deepspeed_config.",
        )
    if not target and values.get("model") is None:
        others = ", or give --model" if name in PREDICTS else ""
        again = " --resume needs the command of the run too." if values.get("resume") else ""
        raise UserInputError(
            "the training command is missing",
            where=f"dsat {name}",
            hint=f"Write `dsat {name} deepspeed train.py`, for example{others}.{again}",
        )


def _look_settings(parser: argparse.ArgumentParser, values: dict[str, Any]) -> ReadOnlySettings:
    settings: Callable[..., ReadOnlySettings] = READ_ONLY[values.pop("command_name")]
    collected = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    try:
        return settings(**collected)
    except UserInputError as error:
        parser.error(str(error))


def _is_program(word: str) -> bool:
    """Return whether a word is a `.py` script, or a program on PATH or beside dsat's Python."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    is_command = bool(word) and shutil.which(word, path=path) is not None
    return word.endswith(".py") or (not Path(word).is_file() and is_command)


def _join_switches(words: Sequence[str], options: Iterable[Option]) -> list[str]:
    """Join `--vary --flag=...` into one word, since argparse would read the flag as an option."""
    flags = {flag: each for each in options for flag in (*each.flags, *each.old)}
    joined: list[str] = []
    for word in words:
        before = flags.get(joined[-1]) if joined else None
        is_switch = word.startswith("-") and word.partition("=")[0] not in flags
        if before is not None and before.kind is SWITCH and is_switch:
            joined[-1] = f"{joined[-1]}={word}"
        else:
            joined.append(word)
    return joined


# -- the parser


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the parser of all commands, for words from which `split` has removed the target.

    Args:
        only: a command; parsing no other is faster. None or an unknown name for all commands.
    """
    parser = argparse.ArgumentParser(
        prog="dsat",
        description="Find the DeepSpeed configuration with which a training script runs fastest.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dsat {__version__}")
    commands = parser.add_subparsers(dest="command_name", required=True, metavar="COMMAND")
    predicts = {name: settings.summary for name, settings in PREDICTS.items()}
    read_only = {name: settings.summary for name, settings in READ_ONLY.items()}
    listed = {**TUNES, **predicts, **read_only}
    methods = {name: search.summary for name, search in SEARCHES.items()}
    summaries = {**listed, **methods}
    for name in [only] if only in summaries else summaries:
        summary = summaries[name]
        shown: dict[str, Any] = {"help": summary} if name in listed else {}
        command = commands.add_parser(name, description=summary, allow_abbrev=False, **shown)
        _add_arguments(command, name)
    return parser


def options_of_command(name: str) -> list[Option]:
    """Return the declared options of a command, one of `METHODS`."""
    if name in SEARCHES or name in TUNES:
        return list(all_options(name if name in SEARCHES else None))
    return list(options_of({**PREDICTS, **READ_ONLY}[name]))


def _add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    options = options_of_command(name)
    if name in READ_ONLY:
        _add(parser, options)
        return
    parser.usage = f"dsat {name} [OPTIONS] COMMAND..."
    parser.usage += f"\n       dsat {name} CONFIG.yaml FOLDER [OPTIONS]"
    if name in PREDICTS:
        parser.usage += f"\n       dsat {name} [OPTIONS] --model MODEL"
        _add(parser, options)
        return
    for group in Group:
        own = [each for each in options if each.group is group]
        if own:
            _add(parser.add_argument_group(group.value), own)


def _add(parser: argparse._ActionsContainer, options: Iterable[Option]) -> None:
    for each in options:
        attributes: dict[str, Any] = {}
        if not each.is_argument:
            attributes |= {"dest": each.name or each.keyword, "default": argparse.SUPPRESS}
        if each.kind is None:
            attributes["action"] = "store_true"
        else:
            nargs: str | int | None = "?" if each.is_argument else None
            if each.many:
                nargs = 1 if each.kind is SWITCH else "+"
            attributes |= {
                "type": _argparse_type(each),
                "nargs": nargs,
                "action": "extend" if each.many else _StoreOnce if each.once else "store",
                "metavar": each.placeholder,
            }
        shown: dict[str, Any] = {"help": each.help_text}
        if each.choices is not None:
            shown["choices"] = each.choices
        parser.add_argument(*each.flags, **{**attributes, **shown})
        if each.old:
            parser.add_argument(*each.old, **{**attributes, "help": argparse.SUPPRESS})


class _StoreOnce(argparse.Action):
    """Store the value of an option, and refuse a second, different one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, values) != values:
            raise argparse.ArgumentError(self, "given twice; run the command once for each value")
        setattr(namespace, self.dest, values)


def _argparse_type(option: Option) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return option.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
