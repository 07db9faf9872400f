"""The user's files as text and as values of JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsat.errors import UserInputError

LARGEST_INTEGER = 2**63 - 1


def read_text(path: Path) -> str:
    """Read the text of a file.

    Raises:
        UserInputError: it does not exist, is not a regular file, or is not UTF-8 text.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe could be read once, and is read twice
            raise UserInputError("cannot be read: it is not a file", where=str(path))
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserInputError("there is no such file", where=str(path)) from None
    except UnicodeDecodeError:
        raise UserInputError("cannot be read: it is not UTF-8 text", where=str(path)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise UserInputError(f"cannot be read: {reason}", where=str(path)) from None


def check(data: Any, at: str = "") -> None:
    """Check that JSON can hold a value with all its parts.

    Raises:
        ValueError: it holds a date, NaN, or what fits into no file or 64 bits. The message says
            what, and where.
        RecursionError: it is nested too deeply.
    """
    if isinstance(data, Mapping):
        for key, value in data.items():
            if isinstance(key, (Mapping, list, tuple)):
                raise ValueError(f"holds a key that is no single value at {at.lstrip('.')}: {key}")
            check(key, at)
            check(value, f"{at}.{key}")
    elif isinstance(data, (list, tuple)):
        for index, value in enumerate(data):
            check(value, f"{at}[{index}]")
    elif isinstance(data, str):
        if "\x00" in data:
            raise ValueError(f"holds a NUL character at {at.lstrip('.')}")
        data.encode("utf-8")  # UnicodeEncodeError is a ValueError
    elif isinstance(data, int) and abs(data) > LARGEST_INTEGER:
        raise ValueError(f"holds a number that is too large at {at.lstrip('.')}")
    elif isinstance(data, float) and not math.isfinite(data):
        raise ValueError(f"holds NaN or Infinity at {at.lstrip('.')}: put a number in its place")
    elif not isinstance(data, (int, float, bool, type(None))):
        raise ValueError(
            f"holds a value that JSON does not know at {at.lstrip('.')}: a {type(data).__name__}. "
            "Put dates into quotes, for example"
        )
