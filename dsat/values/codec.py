"""Conversion between dataclasses and JSON, for everything that outlives a process.

A missing field gets its default and an unknown field is ignored, so that earlier and later versions
read each other's files. `DecodeError` names the invalid value, or the field that is missing.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Union

from dsat.values.text import printable

T = TypeVar("T")
_PLAIN = (str, int, float, bool)  # values that are JSON already
_hints = functools.cache(typing.get_type_hints)


class DecodeError(ValueError):
    """Invalid recorded value.

    Args:
        where: path to the value (`outcome.metrics.latency`); empty for the whole value.
    """

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where or 'it'} {problem}")


class Recorded:
    """Base of dataclasses that are stored as JSON."""

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = encode(self)
        return data

    @classmethod
    def from_json(cls: type[T], data: Mapping[str, Any]) -> T:
        """Build the value from a parsed JSON object; raise DecodeError if it is invalid."""
        value: T = decode(cls, data)
        return value


def encode(value: Any) -> Any:
    """Return a value as JSON: dataclasses become objects, tuples become lists."""
    if value is None or type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: encode(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(inner) for inner in value]
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)  # an integer of numpy
    return value


def decode(kind: Any, data: Any, where: str = "") -> Any:
    """Return parsed JSON as a value of the type `kind`.

    Args:
        kind: a type annotation; the only unions are `T | None`.
        data: what `json.loads` returned.
        where: path to the value, for errors.

    Raises:
        DecodeError: the data are not of this type, or hold NaN or infinity.
    """
    origin, inner = _parts(kind)
    if origin in (Union, types.UnionType):
        (kind,) = set(inner) - {types.NoneType}
        return None if data is None else decode(kind, data, where)
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, _check(dict, data, where), where)
    if origin is tuple:
        return _tuple(inner, _check(list, data, where), where)
    if origin is not None and issubclass(origin, Mapping):
        entries = _check(dict, data, where).items()
        return {key: decode(inner[1], value, f"{where}.{key}") for key, value in entries}
    if origin is not None and issubclass(origin, Sequence):
        items = enumerate(_check(list, data, where))
        return [decode(inner[0], value, f"{where}[{i}]") for i, value in items]
    if issubclass(kind, enum.Enum):
        members = {member.value: member for member in kind}
        if _check(str, data, where) not in members:
            raise DecodeError(where, f"must be one of {', '.join(members)}, not {data!r}")
        return members[data]
    return _check(kind, data, where)


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


_NAMES = {
    dict: "an object",
    list: "a list",
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
}


def _check(kind: Any, data: Any, where: str) -> Any:
    # JSON does not distinguish integers and floats; in Python, booleans are integers.
    classes = (int, float) if kind is float else kind
    if not isinstance(data, classes) or (isinstance(data, bool) and kind is not bool):
        raise DecodeError(where, f"must be {_NAMES[kind]}, not {printable(repr(data), 80)}")
    if isinstance(data, float) and not math.isfinite(data):
        raise DecodeError(where, f"must be finite, not {data}")
    return data


def _dataclass(kind: Any, data: Mapping[str, Any], where: str) -> Any:
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
        raise DecodeError(where or kind.__name__, f"has an invalid value: {error}") from None


def _tuple(kinds: Sequence[Any], data: Sequence[Any], where: str) -> Any:
    if kinds[-1] is Ellipsis:
        kinds = [kinds[0]] * len(data)
    if len(data) != len(kinds):
        raise DecodeError(where, f"must be a list of {len(kinds)}, not of {len(data)}")
    return tuple(
        decode(kind, value, f"{where}[{i}]")
        for i, (kind, value) in enumerate(zip(kinds, data, strict=True))
    )
