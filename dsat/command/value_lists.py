"""Lists of values in a DeepSpeed configuration, which span a search space."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from dsat.command.ds_config import BATCH_KEYS, STAGES, check_sections, check_stage, whole_number
from dsat.errors import UserInputError

ALL_STAGES = "all"


def split(config: Mapping[str, Any], *, where: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Split a configuration into one without lists of values to try, and the lists.

    Only lists in `zero_optimization` and of batch sizes count; elsewhere a list is one value.
    Determined's `{"type": "categorical", "vals": [...]}` is a list too. `"stage": "all"` (also
    `"zero_optimization": "all"`) lists all stages. Lists inside a section of `zero_optimization`
    expand to all combinations: `{"device": "cpu", "pin_memory": [true, false]}` becomes a list of
    two sections.

    Returns:
        The configuration with the first value of each list, and the lists by setting, without
        duplicates.

    Raises:
        UserInputError: a list is empty, contains an invalid value or a list, or is for
            `train_batch_size`; a value is a range; or `check_sections` refuses a section.
    """
    base = dict(config)
    listed: dict[str, list[Any]] = {}
    for key in BATCH_KEYS:
        values = _listed_values(base.get(key), f"{where}: {key}")
        if values is None:
            continue
        if key == "train_batch_size":
            raise UserInputError(
                "cannot be a list",
                where=f"{where}: {key}",
                hint="List train_micro_batch_size_per_gpu and gradient_accumulation_steps instead.",
            )
        numbered = enumerate(values)
        listed[key] = _distinct(whole_number(v, f"{where}: {key}[{n}]") for n, v in numbered)
        base[key] = listed[key][0]
    zero = base.get("zero_optimization")
    if zero == ALL_STAGES:
        zero = {"stage": ALL_STAGES}
    if isinstance(zero, Mapping):
        base["zero_optimization"] = zero = dict(zero)
        for key, value in zero.items():
            options = _zero_values(key, value, f"{where}: zero_optimization.{key}")
            if options is not None:
                listed[key] = _distinct(options)
                zero[key] = listed[key][0]
    check_sections(base, where=where)
    return base, listed


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Drop duplicates and keep the order; true and 1 differ."""
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def _listed_values(value: Any, where: str) -> list[Any] | None:
    """Return the values of a list or of a "categorical" mapping; None for any other value.

    Raises UserInputError for Determined's ranges and for an empty list.
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind in ("int", "double", "log"):
        raise UserInputError(
            f"is a range ({kind})", where=where, hint="Give a list of values instead."
        )
    hint = "Give at least one value, or leave it out."
    if kind == "categorical":
        if "vals" not in value:
            raise UserInputError('has no "vals"', where=where, hint=hint)
        value = value["vals"]
    if value == []:
        raise UserInputError("is an empty list", where=where, hint=hint)
    return value if isinstance(value, list) else None


def _zero_values(key: str, value: Any, where: str) -> list[Any] | None:
    """Return the listed values of a `zero_optimization` setting; None if it has one value."""
    if key == "leaf_module":  # the only section whose settings are lists themselves
        return None
    values = [value] if (key, value) == ("stage", ALL_STAGES) else _listed_values(value, where)
    if values is None:
        return _product(value, where) if isinstance(value, Mapping) else None
    numbered = enumerate(values)
    return [option for n, item in numbered for option in _options(key, item, f"{where}[{n}]")]


def _options(key: str, item: Any, where: str) -> list[Any]:
    if isinstance(item, Mapping):
        return _product(item, where) or [dict(item)]
    if isinstance(item, list):
        raise UserInputError(
            f"is a list inside a list: {item!r}",
            where=where,
            hint="Write one list of values.",
        )
    if isinstance(item, float) and item.is_integer() and key != "ratio":
        item = int(item)  # 5e8 is a size
    if key != "stage":
        return [item]
    if item == ALL_STAGES:
        return list(STAGES)
    check_stage(item, where=where)
    return [item]


def _product(section: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    listed = {}
    for key, value in section.items():
        options = _zero_values(key, value, f"{where}.{key}")
        if options is not None:
            listed[key] = _distinct(options)
    if not listed:
        return None
    return [
        {**section, **dict(zip(listed, combination, strict=True))}
        for combination in itertools.product(*listed.values())
    ]
