"""The script's flag of the batch size, found by its value and its name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_BATCH_SIZES = {"bs", "bsz", "mbs"}  # words in flags, such as `--train-bs`
_SHORT = ("-b", "-bs")  # flags
# Usual names of the batch size, without dashes; and parts of names that mean another one.
_USUAL = re.compile(
    r"b|bsz?|mbs|(per_(device|gpu)_)?(train_)?(micro_)?batch_size(_per_(device|gpu))?"
)
_OTHER_BATCHES = re.compile(
    r"eval|valid|test|(?<![a-z])(dev(?!ice)|every|gen|infer|log|pred|val)", re.IGNORECASE
)


def find_batch_flag(args: Sequence[str], fed: int, options: Mapping[str, Any]) -> str:
    """Return the flag that most likely sets the script's batch size; empty if there is none.

    Args:
        args: the script's arguments.
        fed: the batch size, which must be the flag's value.
        options: flags that the script declares, with their defaults.
    """
    given = {}
    for word, after in zip(args, [*args[1:], ""], strict=False):
        flag, has_value, value = word.partition("=")
        # Hydra's arguments have no dashes: `train.batch_size=4`.
        if has_value or flag.startswith("--") or flag in _SHORT:
            given[flag] = value if has_value else after
    found = [
        flag for flag, value in {**given, **options, **given}.items() if str(value) == str(fed)
    ]
    return min(filter(_may_be_batch, found), key=_unlikeliness, default="")


def _may_be_batch(flag: str) -> bool:
    is_short = flag in _SHORT or _BATCH_SIZES & set(re.split(r"\W|_", flag.lower()))
    return bool(is_short or "batch" in flag.lower()) and not _OTHER_BATCHES.search(flag)


def _unlikeliness(flag: str) -> int:
    name = flag.lower().lstrip("-").replace("-", "_").rpartition(".")[2]
    return 0 if _USUAL.fullmatch(name) else 2 if name.endswith("batches") else 1
