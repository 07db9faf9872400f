"""Flags of a training script that must agree with a trial's configuration.

Hugging Face's `TrainingArguments` repeat the batch sizes, and the Trainer refuses to run if they
differ from the DeepSpeed configuration (transformers/integrations/deepspeed.py). For other scripts,
`arg_mappings` names the flags that repeat settings. All functions are pure and work on lists of
arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.command import switches as known_switches
from dsat.command.ds_config import (
    AUTO,
    BATCH_KEYS,
    CONFIG_KEY,
    OVERWRITE_KEY,
    at,
    did_you_mean,
    whole_number,
)
from dsat.command.switches import CHECKPOINTING, CHECKPOINTING_FLAGS
from dsat.errors import InvalidTrial, UserInputError

HF_BATCH_FLAGS: Mapping[str, str] = {
    "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
}
# Defaults of the flags (transformers/training_args.py).
_HF_DEFAULTS = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
# Fields of TrainingArguments that repeat a DeepSpeed setting; all scripts of a Trainer have their
# flags.
_HF_KNOWN = frozenset(
    """
    gradient_accumulation_steps gradient_checkpointing learning_rate max_grad_norm
    per_device_train_batch_size warmup_steps weight_decay
    """.split()
)

_CONFIG_FLAG = re.compile(
    r"--?(?:deepspeed(?=[_-])|ds[_-]?(?:config|cfg)(?![^_-]))(?:[_-]?(?:config|cfg|json|file|path))*"
)
_TRUE = frozenset("true yes t y 1".split())  # words that HfArgumentParser accepts
_BOOLEANS = _TRUE | frozenset("false no f n 0".split())


@dataclass(frozen=True)
class _Place:
    """One occurrence of a flag: the indices of the flag and of its value.

    Attributes:
        value: index of the value: the flag's index for `--flag=value`, None for a bare flag.
    """

    flag: int
    value: int | None

    def read(self, args: Sequence[str]) -> str:
        if self.value is None:
            return ""
        return args[self.value].partition("=")[2] if self.value == self.flag else args[self.value]

    def write(self, args: list[str], value: object) -> None:
        """Replace the value, or insert the value after a bare flag."""
        if self.value is None:
            args.insert(self.flag + 1, str(value))
        elif self.value == self.flag:
            args[self.flag] = f"{args[self.flag].partition('=')[0]}={value}"
        else:
            args[self.value] = str(value)


def rewrite(
    args: Sequence[str], values: Mapping[str, Any], mappings: Mapping[str, str], *, add: bool
) -> tuple[str, ...]:
    """Return the arguments with the flags of `mappings` set to `values`.

    `--flag value`, `--flag=value` and dashes instead of underscores are recognised. All occurrences
    of a flag change, unless its new value is "auto" or None. A bare switch is kept for True and
    removed for False.

    Args:
        mappings: the flag of each key, with its leading dashes.
        add: whether to add flags that are missing.

    Raises:
        UserInputError: a value is a whole section, which no flag can hold.
    """
    result = list(args)
    for key, flag in mappings.items():
        value = values.get(key)
        if value is None or value == AUTO:
            continue
        if isinstance(value, bool):
            _switch(result, flag, value, add=add)
        elif isinstance(value, (int, float, str)):
            places = _places(result, flag)
            for place in reversed(places):
                place.write(result, value)
            if add and not places:
                _append(result, flag, str(value))
        else:
            raise UserInputError(
                f"{flag} needs a single value, but {key} is {value!r}",
                where="arg_mappings",
                hint=f"Map a setting inside {key} instead.",
            )
    return tuple(result)


def _switch(args: list[str], flag: str, value: bool, *, add: bool) -> None:
    """Switch a flag on or off, in the form that the arguments use; `add` adds a missing flag."""
    negative = _places(args, f"--no_{flag.lstrip('-')}")
    if value:  # a negative flag that comes last would win
        for place in reversed(negative):
            del args[place.flag]
    places = _places(args, flag, switch=True)
    for place in reversed(places):
        if place.value is not None:
            place.write(args, value)
        elif not value:
            del args[place.flag]
    if places or not add:
        return
    if value:
        _append(args, flag)
    elif looks_like_hf(args) and not negative:
        # In subclasses of TrainingArguments the default may be True (TRL's SFTConfig).
        _append(args, flag, str(value))


def _append(args: list[str], *words: str) -> None:
    end = _end(args)
    args[end:end] = words


def value_of(args: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag's last occurrence; "" for a bare flag, None for a missing one."""
    places = _places(args, flag)
    return places[-1].read(args) if places else None


def is_on(args: Sequence[str], flag: str) -> bool:
    """Return whether a switch is among the arguments and not set to false."""
    places = _places(args, flag, switch=True)
    return bool(places) and (places[-1].read(args) or "true").lower() in _TRUE


def config_flag(args: Sequence[str]) -> str | None:
    """Return the flag that names the DeepSpeed configuration; None if there is none.

    `--deepspeed` is a switch in plain DeepSpeed scripts, and takes a file in scripts of a Trainer.
    Other flags, such as `--ds_config`, count only if their value is the path of a JSON file.
    """
    if value_of(args, "--deepspeed_config"):
        return "--deepspeed_config"
    if looks_like_hf(args):
        return "--deepspeed"
    flags = (word.partition("=")[0] for word in args)
    hits = (flag for flag in flags if _CONFIG_FLAG.fullmatch(flag))
    return next((f for f in hits if (value_of(args, f) or "").endswith((".json", ".hjson"))), None)


def path_in(word: str) -> str:
    """Return the path that an argument names: a whole word, or what follows `--flag=`."""
    return word.partition("=")[2] if word.startswith("-") else word


def replace_config(args: Sequence[str], path: str, word: str = "") -> tuple[str, ...]:
    """Return the arguments with `path` as their DeepSpeed configuration, if they name any.

    `word` is the argument that names the present configuration; empty to look for a known flag.
    """
    if word:
        new = word.removesuffix(path_in(word)) + path
        return tuple(new if arg == word else arg for arg in args)
    flag = config_flag(args)
    return tuple(args) if flag is None else rewrite(args, {flag: path}, {flag: flag}, add=False)


def looks_like_hf(args: Sequence[str]) -> bool:
    """Return whether `--deepspeed` names a JSON file, as in scripts of a Trainer."""
    return (value_of(args, "--deepspeed") or "").endswith(".json")


def mappings_for(args: Sequence[str], arg_mappings: Mapping[str, str]) -> dict[str, str]:
    """Return the flags that trials set, by setting: of TrainingArguments and of `arg_mappings`.

    Batch size flags of the Trainer have the same meaning in scripts without a Trainer.
    """
    is_hf = looks_like_hf(args)
    flags = {key: flag for key, flag in HF_BATCH_FLAGS.items() if is_hf or _places(args, flag)}
    for flag in CHECKPOINTING_FLAGS:
        if is_hf and _places(args, flag):
            flags[CHECKPOINTING] = flag
    return {**flags, **arg_mappings}


def check_mappings(
    mappings: Mapping[str, str], args: Sequence[str], *, where: str
) -> dict[str, str]:
    """Check the user's mappings, and spell each flag like the arguments (dashes or underscores).

    Raises UserInputError for a flag that neither the arguments nor TrainingArguments contain.
    """
    flags = {_plain(flag): flag for flag in (arg.partition("=")[0] for arg in args)}
    words = {_plain(arg.partition("=")[0]): arg.partition("=")[0] for arg in args if "=" in arg}
    is_trainer = bool(value_of(args, "--deepspeed"))
    spelled = {}
    for setting, flag in mappings.items():
        spelling = flags.get(_plain(flag)) or words.get(_plain(flag.lstrip("-")))
        is_known = is_trainer and _plain(flag).lstrip("_") in _HF_KNOWN
        # A switch that is off is not among the arguments.
        if spelling is None and not is_known and setting != CHECKPOINTING:
            raise UserInputError(
                f"maps {setting} to {flag}, which is not in the training script's arguments",
                where=where,
                hint=did_you_mean(flag, flags.values())
                + f"Add {flag} to the arguments, or correct the mapping.",
            )
        spelled[setting] = spelling or flag
    return spelled


def setting(config: Mapping[str, Any], key: str) -> Any:
    """Return a setting by its dotted path, or by its name in any section; None if missing."""
    value = at(config, key)
    if value is not None:
        return value
    inner = (setting(part, key) for part in config.values() if isinstance(part, Mapping))
    return next((value for value in inner if value is not None), None)


def adapt_to_trial(
    args: Sequence[str],
    config: Mapping[str, Any],
    switches: Mapping[str, Any],
    arg_mappings: Mapping[str, str],
    *,
    add: bool,
) -> tuple[str, ...]:
    """Return the arguments of a script under a trial's configuration.

    `add` adds flags of TrainingArguments that are missing.
    """
    mappings = mappings_for(args, arg_mappings)
    values = {key: setting(config, key) for key in mappings if key not in switches}
    adapted = rewrite(args, values, mappings, add=add)
    for name, value in switches.items():
        flag = arg_mappings.get(name) or known_switches.flag_of(name, args, takes_hf_flags=add)
        if flag is not None:
            for extra, text in known_switches.flag_values(flag, value).items():
                may_add = add or extra == flag  # add a second flag only if the parser knows it
                adapted = rewrite(adapted, {extra: text}, {extra: extra}, add=may_add)
    return adapted


def batch_from_args(
    config: Mapping[str, Any],
    args: Sequence[str],
    arg_mappings: Mapping[str, str],
    hparams: Mapping[str, Any],
) -> dict[str, Any]:
    """Replace missing and "auto" batch sizes by values of the script's flags.

    If a Trainer's command lacks a flag, the flag's default is used. Other sizes stay.
    Raises UserInputError if a flag's value is no positive integer.
    """
    args = [*args, *_flags_of_hparams(hparams, args)]
    mappings, sizes = mappings_for(args, arg_mappings), dict(config)
    for key, default in _HF_DEFAULTS.items():
        if config.get(key) not in (None, AUTO) or key not in mappings:
            continue
        text = value_of(args, mappings[key])
        if text is not None:
            number = int(text) if re.fullmatch(r"\+?[0-9]+", text, re.ASCII) else text
            sizes[key] = whole_number(number, mappings[key])
        elif looks_like_hf(args) and _needs_flag(config, key):
            sizes[key] = default
    return sizes


def _flags_of_hparams(hparams: Mapping[str, Any], args: Sequence[str]) -> list[str]:
    """Return the batch-size flags that a Trainer's script makes from its hyperparameters.

    In Determined's examples, scripts append the hyperparameters `training_arguments` to the
    arguments, where they override flags of the command line.
    """
    own_hparams = {k: value for k, value in hparams.items() if k not in (CONFIG_KEY, OVERWRITE_KEY)}
    values = {flag: setting(own_hparams, flag.lstrip("-")) for flag in HF_BATCH_FLAGS.values()}
    if not looks_like_hf(args) and values["--per_device_train_batch_size"] is None:
        return []  # gradient_accumulation_steps may be DeepSpeed's
    return [w for flag, value in values.items() if value is not None for w in (flag, str(value))]


def _needs_flag(config: Mapping[str, Any], key: str) -> bool:
    """Return whether a configuration leaves a batch size to the script's flag."""
    is_implied = isinstance(config.get(BATCH_KEYS[0]), int)  # by the global batch
    return config.get(key) == AUTO or (config.get(key) is None and not is_implied)


def expected_flags(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, int]:
    """Return the Trainer's batch-size flags that `config` depends on, with values from `sizes`.

    `config` is the user's DeepSpeed configuration, and `sizes` are its batch sizes.
    """
    return {flag: sizes[key] for key, flag in HF_BATCH_FLAGS.items() if _needs_flag(config, key)}


def check_flags(args: Sequence[str], expected: Mapping[str, int]) -> None:
    """Raise InvalidTrial if a Trainer's arguments have other batch sizes than expected."""
    for key, flag in HF_BATCH_FLAGS.items():
        text = value_of(args, flag) or str(_HF_DEFAULTS[key])
        if flag in expected and text != str(expected[flag]):
            raise InvalidTrial(
                f"the script runs with {flag} {text}, but dsat assumed {expected[flag]} for your "
                f"own configuration. Write hyperparameters.{OVERWRITE_KEY}.{key}: {text} into the "
                "experiment configuration"
            )


def _places(args: Sequence[str], flag: str, *, switch: bool = False) -> list[_Place]:
    """Find all occurrences of a flag before `--`; a switch takes only words for true and false."""
    plain, places = _plain(flag), []
    is_word = not flag.startswith("-")  # Hydra's `trainer.batch_size=4`
    for index in range(_end(args)):
        name, equals, _ = args[index].partition("=")
        is_other = not equals if is_word else not name.startswith("-")
        if is_other or _plain(name) != plain:
            continue
        has_value = index + 1 < _end(args) and _is_value(args[index + 1], switch=switch)
        value = index if equals else index + 1 if has_value else None
        places.append(_Place(index, value))
    return places


def _plain(flag: str) -> str:
    return flag.replace("-", "_")


def _is_value(arg: str, *, switch: bool) -> bool:
    if switch:
        return arg.lower() in _BOOLEANS
    return not arg.startswith("-") or re.fullmatch(r"-\d*\.?\d+(e-?\d+)?", arg) is not None


def _end(args: Sequence[str]) -> int:
    return args.index("--") if "--" in args else len(args)
