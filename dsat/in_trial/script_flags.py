"""Flags of a training script that repeat its batch size or its accumulation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_BATCH_SIZES = {"bs", "bsz", "mbs"}  # words in flags, such as `--train-bs`
_SHORT = ("-b", "-bs")  # flags
# Usual names of the batch size, without dashes; and parts of names that mean something else.
_USUAL = re.compile(
    r"b|bsz?|mbs|(per_(device|gpu)_)?(train_)?(micro_)?batch_size(_per_(device|gpu))?"
)
_OTHER_BATCHES = re.compile(
    r"accum|eval|valid|test|(?<![a-z])(dev(?!ice)|every|gen|infer|log|pred|val)", re.IGNORECASE
)
_ACCUMULATION = "gradient_accumulation_steps"
_LIKE_ACCUMULATION = re.compile(
    r"(?!eval).*(accum|grad(ient)?_acc|update_freq|(?<![a-z])gas?(?![a-z]))"
)


def find_batch_flag(args: Sequence[str], batch_size: int, options: Mapping[str, Any]) -> str:
    """Return the flag that most likely sets the script's batch size; empty if there is none.

    Args:
        args: the script's arguments.
        batch_size: must be the flag's value.
        options: flags that the script declares, with their defaults.
    """
    flags = _flags_with(args, batch_size, options)
    return min(filter(_may_be_batch, flags), key=_unlikeliness, default="")


def find_accumulation_flag(args: Sequence[str], gas: int, options: Mapping[str, Any]) -> str:
    """Return the flag that most likely repeats the accumulation steps `gas`; empty if none does.

    If `gas` is 1, only the usual name counts, because many flags have this value.
    """
    flags = _flags_with(args, gas, options)
    exact = [flag for flag in flags if _name(flag) == _ACCUMULATION]
    similar = [flag for flag in flags if gas > 1 and _LIKE_ACCUMULATION.match(_name(flag))]
    return next(iter([*exact, *similar]), "")


def _flags_with(args: Sequence[str], value: int, options: Mapping[str, Any]) -> list[str]:
    """Return flags that have this value in the arguments, then those that have it by default."""
    arguments = {}
    for word, next_word in zip(args, [*args[1:], ""], strict=False):
        flag, has_value, text = word.partition("=")
        # Hydra's arguments have no dashes: `train.batch_size=4`.
        if has_value or flag.startswith("--") or flag in _SHORT:
            arguments[flag] = text if has_value else next_word
    values = {**arguments, **options, **arguments}
    return [flag for flag, flag_value in values.items() if str(flag_value) == str(value)]


def _may_be_batch(flag: str) -> bool:
    is_short = flag in _SHORT or _BATCH_SIZES & set(re.split(r"\W|_", flag.lower()))
    return bool(is_short or "batch" in flag.lower()) and not _OTHER_BATCHES.search(flag)


def _unlikeliness(flag: str) -> int:
    name = _name(flag)
    return 0 if _USUAL.fullmatch(name) else 2 if name.endswith("batches") else 1


def _name(flag: str) -> str:
    return flag.lower().lstrip("-").replace("-", "_").rpartition(".")[2]
