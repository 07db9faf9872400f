"""The user's files as text and as JSON values, within bounds that no honest file reaches."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsat.errors import UserInputError

LARGEST_FILE = 2**20
LARGEST_INTEGER = 2**63 - 1
DEEPEST = 64
_MOST_VALUES = 100_000
TOO_LARGE = "holds a number that is too large"


def read_text(path: Path) -> str:
    """Read the text of a file.

    Raises:
        UserInputError: there is none, it is no regular file, too large, or no UTF-8 text.
    """
    where = str(path)
    try:
        # A pipe is not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            kind = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(kind):
                what = "a folder" if stat.S_ISDIR(kind) else "not a file"
                raise UserInputError(f"cannot be read: it is {what}", where=where)
            content = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise UserInputError("there is no such file", where=where) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise UserInputError(f"cannot be read: {reason}", where=where) from None
    if len(content) > LARGEST_FILE:
        raise UserInputError(
            f"cannot be read: it is larger than {LARGEST_FILE // 2**20} MiB", where=where
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise UserInputError("cannot be read: it is not UTF-8 text", where=where) from None


def check(data: Any) -> None:
    """Check a value of JSON or yaml, with all its parts.

    Raises:
        ValueError: it is too large, nested too deeply, or holds what JSON does not know. The
            message says what, and where.
    """
    left = [(data, "", 1)]
    count = 0
    while left:
        value, path, depth = left.pop()
        count += 1
        if count > _MOST_VALUES:
            raise ValueError(f"holds more than {_MOST_VALUES:,} values")
        if isinstance(value, Mapping):
            for key in value:
                _check_single(key, path)
            left += [(inner, f"{path}.{key}"[-200:], depth + 1) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            left += [(inner, f"{path}[{i}]"[-200:], depth + 1) for i, inner in enumerate(value)]
        else:
            _check_single(value, path)
        if depth > DEEPEST:
            raise ValueError(f"is nested too deeply: more than {DEEPEST} levels")


def _check_single(value: Any, path: str) -> None:
    at = f" at {path.lstrip('.')}" if path else ""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        if "\x00" in value:
            raise ValueError(f"holds a NUL character{at}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"holds half of a surrogate pair{at}") from None
    elif isinstance(value, int):
        if abs(value) > LARGEST_INTEGER:
            raise ValueError(f"{TOO_LARGE}{at}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"holds NaN or Infinity{at}: put a number in its place")
    else:
        raise ValueError(
            f"holds a value that JSON does not know{at}: a {type(value).__name__}. "
            "Put dates into quotes, for example"
        )
