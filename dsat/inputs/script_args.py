"""A training script's own command-line flags that must agree with a trial's configuration.

Hugging Face's `TrainingArguments` name the batch sizes a second time, and the Trainer refuses to
run when they and the DeepSpeed configuration differ (transformers/integrations/deepspeed.py). Other
scripts say with `arg_mappings` which of their flags repeats which DeepSpeed setting. Pure functions
on lists of arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.errors import UserInputError
from dsat.inputs.ds_config import AUTO, did_you_mean

CHECKPOINTING = "gradient_checkpointing"  # a switch of the script, not a setting of DeepSpeed

HF_BATCH_FLAGS: Mapping[str, str] = {
    "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
}
HF_FLAGS: Mapping[str, str] = {**HF_BATCH_FLAGS, CHECKPOINTING: "--gradient_checkpointing"}
# What the flags are when they are not given (transformers/training_args.py).
_HF_DEFAULTS = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
_HF_CHECKPOINTING_FLAGS = ("--gradient_checkpointing", "--activation_checkpointing")

# Flags of TrainingArguments, each enough to know them by once `--deepspeed` is given a file.
_HF_SIGNS = tuple(
    f"--{name}"
    for name in """
    output_dir overwrite_output_dir do_train do_eval do_predict num_train_epochs max_steps
    per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps
    gradient_checkpointing activation_checkpointing lr_scheduler_type warmup_ratio warmup_steps
    evaluation_strategy eval_strategy eval_steps save_strategy save_steps save_total_limit
    logging_strategy logging_steps logging_dir report_to ddp_timeout dataloader_num_workers
    """.split()
)

# Flags of TrainingArguments that repeat a DeepSpeed setting: a Trainer's script knows them, given
# or not.
_HF_KNOWN = frozenset(
    """
    --gradient_accumulation_steps --gradient_checkpointing --learning_rate --max_grad_norm
    --per_device_train_batch_size --warmup_steps --weight_decay
    """.split()
)

_TRUE = frozenset("true yes t y 1".split())  # HfArgumentParser's
_BOOLEANS = _TRUE | frozenset("false no f n 0".split())


@dataclass(frozen=True)
class _Place:
    """One occurrence of a flag: where it is, and where its value, if it has one.

    Attributes:
        flag: index of the flag itself.
        value: index of its value: the same for `--flag=value`, None for a bare flag.
    """

    flag: int
    value: int | None


def rewrite(
    args: Sequence[str], values: Mapping[str, Any], mappings: Mapping[str, str], *, add: bool
) -> tuple[str, ...]:
    """Return the arguments with the flags of `mappings` set to `values`.

    `--flag value`, `--flag=value` and dashes in place of underscores are understood, and of a
    repeated flag every occurrence is changed. "auto" and None never reach the command line: such a
    flag stays as the user wrote it. A bare switch is kept for True and removed for False.

    Args:
        args: of the script.
        values: by the keys of `mappings`.
        mappings: the flag of each key, with its leading dashes.
        add: also give flags that the user did not.

    Raises:
        UserInputError: a value is a whole section, which no flag can hold.
    """
    result = list(args)
    for key, flag in mappings.items():
        value = values.get(key)
        if value is None or value == AUTO:
            continue
        if not isinstance(value, (bool, int, float, str)):
            raise UserInputError(
                f"{flag} cannot be given {key}, which is no single value: {value!r}",
                where="arg_mappings",
                hint=f"Map a setting below {key} instead.",
            )
        if isinstance(value, bool):
            result = _switch(result, flag, value, add=add)
        else:
            result = _set(result, flag, value, add=add)
    return tuple(result)


def _set(args: list[str], flag: str, value: float | str, *, add: bool) -> list[str]:
    places = _places(args, flag)
    result = list(args)
    for place in reversed(places):
        if place.value is None:  # it lacks its value
            result.insert(place.flag + 1, str(value))
        else:
            result[place.value] = _with_value(args, place, value)
    return result if places or not add else _appended(result, flag, str(value))


def _switch(args: list[str], flag: str, value: bool, *, add: bool) -> list[str]:
    """Switch a flag on or off, in its own form or else as a bare flag."""
    negative = f"--no_{flag.lstrip('-')}"
    if value:  # argparse would let it win if it comes last
        gone = {place.flag for place in _places(args, negative)}
        args = [arg for index, arg in enumerate(args) if index not in gone]
    places = _places(args, flag, switch=True)
    result = list(args)
    for place in reversed(places):
        if place.value is not None:
            result[place.value] = _with_value(args, place, value)
        elif not value:
            del result[place.flag]
    if places or not add:
        return result
    if value:
        return _appended(result, flag)
    if looks_like_hf(args) and not _places(args, negative):
        # Classes made of TrainingArguments may have it true by default (trl's SFTConfig).
        return _appended(result, flag, str(value))
    return result


def _with_value(args: Sequence[str], place: _Place, value: object) -> str:
    assert place.value is not None
    if place.value != place.flag:
        return str(value)
    return f"{args[place.flag].partition('=')[0]}={value}"


def _appended(args: list[str], *words: str) -> list[str]:
    end = _end(args)
    return [*args[:end], *words, *args[end:]]


def value_of(args: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag's last occurrence; "" for a bare flag, None if there is none."""
    places = _places(args, flag)
    if not places:
        return None
    place = places[-1]
    if place.value is None:
        return ""
    if place.value == place.flag:
        return args[place.flag].partition("=")[2]
    return args[place.value]


def is_on(args: Sequence[str], flag: str) -> bool:
    """Tell whether a switch is there, and not given a word for false."""
    places = _places(args, flag, switch=True)
    if not places:
        return False
    place = places[-1]
    if place.value is None:
        return True
    word = args[place.value].partition("=")[2] if place.value == place.flag else args[place.value]
    return word.lower() in _TRUE


def looks_like_hf(args: Sequence[str]) -> bool:
    """Tell the arguments of transformers' TrainingArguments with DeepSpeed from others."""
    config = value_of(args, "--deepspeed") or ""
    return config.endswith(".json") and any(_places(args, sign) for sign in _HF_SIGNS)


def mappings_for(args: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the flags that follow a trial: the user's own, and those of TrainingArguments.

    Scripts without a Trainer that have the flags of its batch sizes mean the same by them.

    Args:
        args: of the script.
        given: the user's `arg_mappings`.
    """
    if not looks_like_hf(args):
        return {
            **{key: flag for key, flag in HF_BATCH_FLAGS.items() if _places(args, flag)},
            **given,
        }
    found = dict(HF_BATCH_FLAGS)
    for flag in _HF_CHECKPOINTING_FLAGS:
        if _places(args, flag):
            found[CHECKPOINTING] = flag
    return {**found, **given}


def checked(mappings: Mapping[str, str], args: Sequence[str], *, where: str) -> dict[str, str]:
    """Return the user's mappings, each flag spelled as in the arguments (dashes or underscores).

    A Hugging Face Trainer's script, which gets its configuration as `--deepspeed FILE`, knows the
    flags of TrainingArguments without being given them.

    Args:
        mappings: setting -> flag.
        args: of the script.
        where: what to name in errors.

    Raises:
        UserInputError: a flag is not among the arguments.
    """
    given = {_plain(flag): flag for flag in (arg.partition("=")[0] for arg in args)}
    is_trainer = bool(value_of(args, "--deepspeed"))
    known = {_plain(flag) for flag in _HF_KNOWN} if is_trainer else set()
    spelled = {}
    for setting, flag in mappings.items():
        found = given.get(_plain(flag))
        # A switch that is off is not there.
        if found is None and _plain(flag) not in known and setting != CHECKPOINTING:
            raise UserInputError(
                f"maps {setting} to {flag}, which the training script does not get",
                where=where,
                hint=did_you_mean(flag, given.values())
                + f"Add {flag} to its arguments, or correct the mapping.",
            )
        spelled[setting] = found or flag
    return spelled


def setting(config: Mapping[str, Any], key: str) -> Any:
    """Return a setting by its name, wherever in the configuration, or by its path with dots.

    None if there is no such setting.
    """
    if key in config:
        return config[key]
    first, dot, rest = key.partition(".")
    if dot:
        section = config.get(first)
        return setting(section, rest) if isinstance(section, Mapping) else None
    for section in config.values():
        if isinstance(section, Mapping):
            value = setting(section, key)
            if value is not None:
                return value
    return None


def for_trial(
    args: Sequence[str],
    config: Mapping[str, Any],
    script_args: Mapping[str, Any],
    given: Mapping[str, str],
    *,
    add: bool,
) -> tuple[str, ...]:
    """Return the arguments of a script under a trial's configuration.

    Args:
        args: the user's own.
        config: the trial's whole DeepSpeed configuration.
        script_args: the trial's values of what is no DeepSpeed setting.
        given: the user's `arg_mappings`.
        add: also give the flags of TrainingArguments that the user did not.
    """
    mappings = mappings_for(args, given)
    values = {**{key: setting(config, key) for key in mappings}, **script_args}
    found = rewrite(args, values, mappings, add=add)
    if CHECKPOINTING in given:  # the user says that there is such a switch, given or not
        found = rewrite(found, values, {CHECKPOINTING: given[CHECKPOINTING]}, add=True)
    return found


def batch_from_args(
    config: Mapping[str, Any], args: Sequence[str], given: Mapping[str, str]
) -> dict[str, Any]:
    """Return a configuration with batch sizes in the place of "auto".

    The Trainer fills in the flags of TrainingArguments or their defaults; other scripts have the
    flags of `arg_mappings`. What cannot be known stays as it is.

    Args:
        config: the user's DeepSpeed configuration.
        args: of their script.
        given: their `arg_mappings`.

    Raises:
        UserInputError: a flag's value is no positive integer.
    """
    mappings, is_hf = mappings_for(args, given), looks_like_hf(args)
    found = dict(config)
    for key, default in _HF_DEFAULTS.items():
        is_open = config.get(key) in (None, AUTO)
        if not is_open or key not in mappings:
            continue
        text = value_of(args, mappings[key])
        if text is not None:
            found[key] = _positive(text, mappings[key])
        elif is_hf:
            found[key] = default
    return found


def _positive(text: str, flag: str) -> int:
    if not re.fullmatch(r"\+?[0-9]+", text) or int(text) < 1:
        raise UserInputError(f"must be a positive integer, not {text!r}", where=flag)
    return int(text)


def _places(args: Sequence[str], flag: str, *, switch: bool = False) -> list[_Place]:
    """Find all places of a flag before `--`; a switch's value is a boolean's word."""
    wanted, places = _plain(flag), []
    for index in range(_end(args)):
        name, equals, _ = args[index].partition("=")
        if not name.startswith("--") or _plain(name) != wanted:
            continue
        if equals:
            places.append(_Place(index, index))
        elif index + 1 < _end(args) and _is_value(args[index + 1], switch=switch):
            places.append(_Place(index, index + 1))
        else:
            places.append(_Place(index, None))
    return places


def _plain(flag: str) -> str:
    return flag.replace("-", "_")


def _is_value(arg: str, *, switch: bool) -> bool:
    if switch:
        return arg.lower() in _BOOLEANS
    return not arg.startswith("-") or re.fullmatch(r"-\d*\.?\d+(e-?\d+)?", arg) is not None


def _end(args: Sequence[str]) -> int:
    return args.index("--") if "--" in args else len(args)
