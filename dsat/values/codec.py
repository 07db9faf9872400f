"""Values as JSON: one reader and one writer of everything that outlives a process.

One rule for what an earlier or a later version wrote: a field that is missing has its default, one
that is not known is ignored. A value of another type than the field's is an error that says where.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Union

from dsat.values.text import printable

T = TypeVar("T")


class DecodeError(ValueError):
    """Invalid recorded value.

    Args:
        where: the path to it (`outcome.metrics.latency`).
        problem: what is wrong with it.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where} {problem}")


class Recorded:
    """A dataclass that is written as JSON and read again."""

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON has them."""
        data: dict[str, Any] = encode(self)
        return data

    @classmethod
    def from_json(cls: type[T], data: Mapping[str, Any]) -> T:
        """The value again; see the rule of this module.

        Raises:
            DecodeError: it is none.
        """
        value: T = decode(cls, data)
        return value


def encode(value: Any) -> Any:
    """A value as JSON has it: dataclasses are objects, tuples are lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: encode(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(inner) for inner in value]
    return value


def decode(kind: Any, data: Any, where: str = "") -> Any:
    """A value from what JSON has of it.

    Args:
        kind: its type, as an annotation has it.
        data: as `json.loads` returns it.
        where: the path to it, for errors.

    Raises:
        DecodeError: it is none of that type.
    """
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, data, where)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _union(inner, data, where)
    if origin is tuple:
        return _tuple(inner, data, where)
    if origin is not None and issubclass(origin, Mapping):
        _expect(isinstance(data, dict), "an object", data, where)
        return {key: decode(inner[1], value, f"{where}.{key}") for key, value in data.items()}
    if origin is not None and issubclass(origin, Sequence):
        _expect(isinstance(data, list), "a list", data, where)
        return [decode(inner[0], value, f"{where}[{i}]") for i, value in enumerate(data)]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        known = [member.value for member in kind]
        _expect(
            isinstance(data, str) and data in known,
            f"one of {', '.join(map(str, known))}",
            data,
            where,
        )
        return kind(data)
    # JSON has one kind of number, but true and false are none.
    accepted = (int, float) if kind is float else kind
    fits = isinstance(data, accepted) and (kind is bool or not isinstance(data, bool))
    _expect(fits, _NAMES.get(kind, str(kind)), data, where)
    if isinstance(data, int):
        _expect(abs(data) <= _LARGEST_INTEGER, "a number that fits into 64 bits", data, where)
    elif isinstance(data, float):
        _expect(math.isfinite(data), "finite", data, where)
    return data


_LARGEST_INTEGER = 2**63 - 1
_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    types.NoneType: "null",
}


def _dataclass(kind: Any, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), "an object", data, where)
    values = {}
    hints = _hints(kind)
    for field in dataclasses.fields(kind):
        path = f"{where}.{field.name}" if where else field.name
        if field.name in data:
            values[field.name] = decode(hints[field.name], data[field.name], path)
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise DecodeError(path, "is missing")
    try:
        return kind(**values)
    except ValueError as error:
        raise DecodeError(where or kind.__name__, f"is impossible: {error}") from None


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _union(kinds: Sequence[Any], data: Any, where: str) -> Any:
    if data is None and types.NoneType in kinds:
        return None
    kinds = [kind for kind in kinds if kind is not types.NoneType]
    for kind in kinds[:-1]:
        try:
            return decode(kind, data, where)
        except DecodeError:
            continue
    return decode(kinds[-1], data, where)


def _tuple(kinds: Sequence[Any], data: Any, where: str) -> Any:
    _expect(isinstance(data, list), "a list", data, where)
    if kinds[-1] is Ellipsis:
        kinds = [kinds[0]] * len(data)
    _expect(len(data) == len(kinds), f"a list of {len(kinds)}", data, where)
    return tuple(
        decode(kind, value, f"{where}[{i}]")
        for i, (kind, value) in enumerate(zip(kinds, data, strict=True))
    )


def _expect(holds: bool, wanted: str, data: Any, where: str) -> None:
    if not holds:
        shown = printable(repr(data), 80)
        raise DecodeError(where or "it", f"must be {wanted}, not {shown}")
