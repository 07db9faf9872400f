"""Lists of values in a DeepSpeed configuration, which span a search space."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from dsat.errors import UserInputError
from dsat.inputs.ds_config import BATCH_KEYS, whole_number

STAGES = (0, 1, 2, 3)
ALL_STAGES = "all"

# The one section of `zero_optimization` whose fields are lists in themselves.
_LISTS_BY_NATURE = frozenset({"leaf_module"})


def split(config: Mapping[str, Any], *, where: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Split a configuration with lists of values into one without lists, and the lists.

    Only lists in `zero_optimization` and of batch sizes count: elsewhere a list is a value.
    Determined's `{"type": "categorical", "vals": [...]}` is a list too, and `"stage": "all"` (also
    `"zero_optimization": "all"`) one of all stages. Lists inside a section of `zero_optimization`
    become the sections that they multiply to: `{"device": "cpu", "pin_memory": [true, false]}` is a
    list of two.

    Returns:
        The configuration with the first value in place of each list, and the lists by the names of
        their settings, each value once and in the order given.

    Raises:
        UserInputError: a list is empty, holds an invalid value, or is not allowed there.
    """
    base = copy.deepcopy(dict(config))
    listed: dict[str, list[Any]] = {}
    for key in BATCH_KEYS:
        values = listed_values(base.get(key), f"{where}: {key}")
        if values is None:
            continue
        if key == "train_batch_size":
            raise UserInputError(
                "cannot be a list",
                where=f"{where}: {key}",
                hint="List train_micro_batch_size_per_gpu and gradient_accumulation_steps instead.",
            )
        listed[key] = distinct(whole_number(value, f"{where}: {key}") for value in values)
    zero = base.get("zero_optimization")
    if zero == ALL_STAGES:
        zero = {"stage": ALL_STAGES}
    if isinstance(zero, (list, str)):
        raise UserInputError(
            f"must be a mapping, not {zero!r}",
            where=f"{where}: zero_optimization",
            hint='Put lists inside it, for example {"stage": [1, 2]}.',
        )
    if isinstance(zero, Mapping):
        base["zero_optimization"] = zero = dict(zero)
        for key, value in zero.items():
            options = _zero_values(key, value, f"{where}: zero_optimization.{key}")
            if options is not None:
                listed[key] = distinct(options)
                zero[key] = copy.deepcopy(listed[key][0])
    for key in BATCH_KEYS:
        if key in listed:
            base[key] = listed[key][0]
    return base, listed


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return each value once, in order; true and 1 are two."""
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())


def listed_values(value: Any, where: str) -> list[Any] | None:
    """Return the values of a list in either form; None if it is a single value."""
    if isinstance(value, Mapping) and value.get("type") in ("int", "double", "log"):
        raise UserInputError(
            f"is a range ({value['type']})", where=where, hint="Give a list of values instead."
        )
    if isinstance(value, Mapping) and value.get("type") == "categorical":
        value = value.get("vals", [])
        if not isinstance(value, list):
            raise UserInputError(f"vals must be a list, not {value!r}", where=where)
    if not isinstance(value, list):
        return None
    if not value:
        raise UserInputError(
            "is an empty list", where=where, hint="Give at least one value, or leave it out."
        )
    return value


def _zero_values(key: str, value: Any, where: str) -> list[Any] | None:
    """Return the values of a setting of `zero_optimization`; None if it has a single one."""
    if key in _LISTS_BY_NATURE:
        return None
    if key == "stage":
        return _stages(value, where)
    values = listed_values(value, where)
    if values is None:
        return _product(value, where) if isinstance(value, Mapping) else None
    options: list[Any] = []
    for item in values:
        inner = _product(item, where) if isinstance(item, Mapping) else None
        options += [_single(key, item, where)] if inner is None else inner
    return options


def _stages(value: Any, where: str) -> list[int] | None:
    values = [ALL_STAGES] if value == ALL_STAGES else listed_values(value, where)
    found: list[int] = []
    for stage in [value] if values is None else values:
        whole = int(stage) if isinstance(stage, float) and stage.is_integer() else stage
        if stage == ALL_STAGES:
            found += STAGES
        elif isinstance(whole, bool) or whole not in STAGES:
            raise UserInputError(
                f'must be 0, 1, 2, 3 or "all", or a list of them, not {stage!r}', where=where
            )
        else:
            found.append(whole)
    return None if values is None else found


def _product(section: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    """Return all combinations of a section's lists; None if it has none."""
    listed = {}
    for key, value in section.items():
        options = _zero_values(key, value, f"{where}.{key}")
        if options is not None:
            listed[key] = distinct(options)
    if not listed:
        return None
    return [
        {**copy.deepcopy(dict(section)), **dict(zip(listed, combination, strict=True))}
        for combination in itertools.product(*listed.values())
    ]


def _single(key: str, value: Any, where: str) -> Any:
    if isinstance(value, list):
        raise UserInputError(f"holds a list in a list, {value!r}", where=where)
    is_whole = isinstance(value, float) and value.is_integer() and key != "ratio"
    return int(value) if is_whole else value  # 5e8 is a size
