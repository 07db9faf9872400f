"""DeepSpeed configurations: the reader of their files, and pure functions on their content.

No function changes its arguments.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dsat.errors import UserInputError
from dsat.inputs import document
from dsat.values.trial import BatchTriple

# Hyperparameters of an experiment that hold the DeepSpeed configuration and what is laid over it.
CONFIG_KEY = "deepspeed_config"
OVERWRITE_KEY = "overwrite_deepspeed_args"
DSAT_MODE_KEY = "_use_dsat_mode"
DSAT_TRIAL_KEY = "_dsat_trial"  # on a cluster: the specification of the trial

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
AUTO = "auto"
NONE = "none"

# Settings of `zero_optimization` and its offload sections that DeepSpeed declares as integers.
_INTEGER = re.compile(r".*_(size|parameters|distance|threshold|count|in_cpu)")


def read(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed configuration from a file of any name.

    Raises:
        UserInputError: it cannot be read, does not parse (with the line), or holds something else.
    """
    try:
        return parse(document.read_text(path))
    except ValueError as error:
        raise UserInputError(str(error), where=str(path)) from None


def parse(text: str) -> dict[str, Any]:
    """Parse a configuration as DeepSpeed does: JSON, or Hjson with its comments.

    Raises:
        ValueError: DeepSpeed would refuse it. The message says what is wrong with it.
    """
    # What is valid JSON needs no hjson, which would also make integers of 1.0 and 5e8.
    try:
        found = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError:
        found = _parse_hjson(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except _DuplicateKeys:
        raise
    except ValueError:  # a number of more digits than Python reads
        raise ValueError(document.TOO_LARGE) from None
    if not isinstance(found, dict):
        raise ValueError("does not hold a mapping of keys to values")
    document.check(found)
    return found


def _parse_hjson(text: str) -> Any:
    import hjson

    try:
        return hjson.loads(text, object_pairs_hook=_without_duplicates)
    except hjson.HjsonDecodeError as error:
        raise ValueError(
            f"is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except OverflowError:  # hjson makes an integer of it
        raise ValueError("is not valid JSON: it holds a number that is too large") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None


class _DuplicateKeys(ValueError):
    """A key is given more than once in a mapping."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping, as `dict_raise_error_on_duplicate_keys` of deepspeed.runtime.config_utils."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = ", ".join(key for key, count in counts.items() if count > 1)
        raise _DuplicateKeys(f"gives a key more than once, which DeepSpeed refuses: {twice}")
    return found


# Sections that dsat reads; DeepSpeed checks all the others (`dsat.in_trial.config_check`).
_SECTIONS = (
    "activation_checkpointing amp bf16 bfloat16 data_types fp16 optimizer scheduler "
    "tensor_parallel torch_autocast zero_optimization"
).split()
_DEVICES = ("none", "cpu", "nvme")


def check_values(config: Mapping[str, Any], *, where: str) -> None:
    """Check the types of the fields that dsat reads, in a configuration without lists.

    Raises:
        UserInputError: a value is of another type.
    """
    for key in _SECTIONS:
        _mapping(config.get(key), f"{where}: {key}")
    if config.get("zero_optimization", {}) is None:  # DeepSpeed cannot read it either
        raise UserInputError("must be a mapping, not null", where=f"{where}: zero_optimization")
    for key in ("optimizer", "scheduler"):
        section = config.get(key) or {}
        _of_type(section.get("type"), str, "the name of one", f"{where}: {key}.type")
        _mapping(section.get("params"), f"{where}: {key}.params")
    for key, value in (config.get("zero_optimization") or {}).items():
        check_zero_value(key, value, where=f"{where}: zero_optimization.{key}")


def check_zero_value(key: str, value: Any, *, where: str) -> None:
    """Check a value of one setting of `zero_optimization`.

    Raises:
        UserInputError: it is of another type.
    """
    if key in ("offload_optimizer", "offload_param"):
        _mapping(value, where)
        section = value or {}
        if section.get("device", NONE) not in (*_DEVICES, None):
            raise UserInputError(
                f"must be one of {', '.join(_DEVICES)}, not {section['device']!r}",
                where=f"{where}.device",
                hint=did_you_mean(section["device"], _DEVICES),
            )
        _of_type(section.get("nvme_path"), str, "the path of a folder", f"{where}.nvme_path")
        _of_type(section.get("ratio"), (int, float), "a number", f"{where}.ratio")
    elif key == "stage" and (isinstance(value, bool) or value not in (0, 1, 2, 3)):
        raise UserInputError(f"must be 0, 1, 2 or 3, not {value!r}", where=where)
    elif is_integer(key) and value not in (None, AUTO):
        whole_number(value, where, least=0)


def is_integer(key: str) -> bool:
    """Tell whether a setting of `zero_optimization` is an integer, by its name."""
    return _INTEGER.fullmatch(key) is not None


def whole_number(value: Any, where: str, *, least: int = 1) -> int:
    """Return an integer; JSON's `5e8` is one too.

    Raises:
        UserInputError: it is none, or out of bounds.
    """
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise UserInputError(f"must be {kind}, not {value!r}", where=where)
    if number > document.LARGEST_INTEGER:
        raise UserInputError(f"{value!r} is too large", where=where)
    return number


def _mapping(value: Any, where: str) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise UserInputError(f"must be a mapping, not {value!r}", where=where)


def _of_type(value: Any, kind: Any, called: str, where: str) -> None:
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise UserInputError(f"must be {called}, not {value!r}", where=where)


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `overrides` over `base`: mappings are merged key by key, other values replaced."""
    merged = copy.deepcopy(dict(base))
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def same_setting(one: str, other: str) -> bool:
    """Compare two keys of `zero_optimization`.

    Some are known with and without `stage3_` (the aliases of DeepSpeedZeroConfig).
    """
    return one.removeprefix("stage3_") == other.removeprefix("stage3_")


# Settings by which slots share each sample; the global batch is a smaller one then.
_SHARING = ("sequence_parallel_size", "tensor_parallel.autotp_size")
_ZENFLOW = "zero_optimization.zenflow"


def _check_comparable(config: Mapping[str, Any], *, where: str) -> None:
    """Raise UserInputError if slots share samples, or DeepSpeed decides on the steps."""
    for key in _SHARING:
        size = at(config, key)
        if isinstance(size, int) and size > 1:
            raise UserInputError(
                f"{size} slots would share each sample, and dsat tunes data-parallel training only",
                where=f"{where}: {key}",
                hint="Take it out to tune the rest; memory and speed are then those without it.",
            )
    # `configure_zenflow` in runtime/zenflow/engine.py, 0.19.8.
    if at(config, _ZENFLOW) not in (None, AUTO):
        raise UserInputError(
            "ZenFlow decides by itself how many micro batches an optimizer step has, and dsat "
            "compares optimizer steps",
            where=f"{where}: {_ZENFLOW}",
            hint="Take it out to tune the rest.",
        )


def at(config: Mapping[str, Any], path: str) -> Any:
    """Return the setting at a path of keys with dots between them; None if there is none."""
    found: Any = config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def resolve_batch(config: Mapping[str, Any], data_parallel: int, *, where: str) -> BatchTriple:
    """Derive the batch sizes (`DeepSpeedConfig._set_batch_related_parameters`).

    Args:
        config: a DeepSpeed configuration; null and "auto" count as not given.
        data_parallel: number of data-parallel slots.
        where: the file to name in errors.

    Raises:
        UserInputError: none is given, one is no positive integer, or they contradict each other; or
            slots share samples, or ZenFlow decides.
    """
    _check_comparable(config, where=where)
    given: dict[str, int] = {}
    for key in BATCH_KEYS:
        value = config.get(key, AUTO)
        if value is None or value == AUTO:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserInputError(
                f"{key} must be a positive integer, not {value!r}", where=f"{where}: {key}"
            )
        given[key] = value
    total, micro, gas = (given.get(key) for key in BATCH_KEYS)
    if total is None and micro is None:
        raise UserInputError(
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given",
            where=where,
            hint=_HOW_TO_GIVE_BATCH[AUTO in (config.get(key) for key in BATCH_KEYS)],
        )
    if total is None:
        assert micro is not None
        gas = gas or 1
        total = micro * gas * data_parallel
    elif micro is None:
        gas = gas or 1
        micro = total // (gas * data_parallel)
    elif gas is None:
        gas = total // (micro * data_parallel)
    if total != micro * gas * data_parallel or min(total, micro, gas) < 1:
        said = ", ".join(f"{key} {value}" for key, value in given.items())
        raise UserInputError(
            f"{said} contradict each other on {data_parallel} slots: train_batch_size must be "
            "train_micro_batch_size_per_gpu x gradient_accumulation_steps x slots",
            where=where,
            hint="Correct one of them or leave it out.",
        )
    return BatchTriple(total, micro, gas)


_HOW_TO_GIVE_BATCH = {
    False: 'Add one of them, for example "train_micro_batch_size_per_gpu": 1.',
    True: 'What "auto" stands for is in the script: write the number of '
    "train_micro_batch_size_per_gpu in its place, or give --per_device_train_batch_size and "
    "--deepspeed on the command line.",
}


def did_you_mean(word: object, known: Iterable[str], likeness: float = 0.6) -> str:
    """Return a sentence that names the nearest known word; empty when none is near.

    Args:
        word: an unknown one.
        known: the words that there are.
        likeness: from which on a word is near, up to 1 (`difflib.SequenceMatcher.ratio`).
    """
    import difflib

    near = difflib.get_close_matches(str(word), sorted(known), n=1, cutoff=likeness)
    return f"Did you mean {near[0]!r}? " if near else ""


def least_stage(config: Mapping[str, Any]) -> int:
    """Return the lowest ZeRO stage that DeepSpeed accepts with the other settings.

    The rule is that of `DeepSpeedConfig._do_error_check`.
    """
    sections = [config.get(name) or {} for name in ("bf16", "bfloat16", "fp16")]
    low = any(
        value is True and key.endswith(("_master_weights_and_grads", "_optimizer_states"))
        for section in sections
        for key, value in section.items()
    )
    return 1 if low else 0


def for_use(
    config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a configuration for use: without sections of autotuners, and with a ZeRO section.

    DeepSpeed takes stage 0 if there is none; accelerate (1.15) insists on one.

    Args:
        config: the user's own.
        overrides: what a trial lays over it.
    """
    found = merge(config, overrides or {})
    found.pop("autotuning", None)
    found["zero_optimization"] = found.get("zero_optimization") or {"stage": 0}
    return found


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return a hexadecimal digest that is equal for equal configurations."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
