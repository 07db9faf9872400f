"""The user's files as text and as JSON values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsat.errors import UserInputError

LARGEST_INTEGER = 2**63 - 1
_MOST_VALUES = 10**6


def read_text(path: Path) -> str:
    """Read the text of a file.

    Raises:
        UserInputError: the file cannot be read, is not a regular file, or is not UTF-8 text.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe can be read once, and dsat reads twice
            raise UserInputError("cannot be read: it is not a file", where=str(path))
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserInputError("there is no such file", where=str(path)) from None
    except UnicodeDecodeError:
        raise UserInputError(
            "cannot be read: it is not UTF-8 text", where=str(path), hint="Save it as UTF-8."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise UserInputError(f"cannot be read: {reason}", where=str(path)) from None


def copy_as_json(data: Any, path: str = "") -> Any:
    """Return a copy of a value, made through JSON: keys are text, and no objects are shared.

    Raises ValueError that names the place if JSON cannot hold a value; RecursionError if too deep.
    """
    try:
        return json.loads(json.dumps(data, allow_nan=False))
    except (TypeError, ValueError) as error:
        is_list = isinstance(data, list)
        for key, value in enumerate(data) if is_list else getattr(data, "items", tuple)():
            copy_as_json(value, f"{path}.{key}")
        reason = f"contains a value that JSON cannot represent{path and f' at {path[1:]}'}: {error}"
        raise ValueError(f"{reason}. Quote dates, and replace NaN and infinity") from None


def check_size(data: Any) -> None:
    """Raise ValueError if a YAML document, with aliases expanded, has too many values."""
    if _count(data, {}) > _MOST_VALUES:
        raise ValueError(f"contains more than {_MOST_VALUES:,} values, counting aliases")


def _count(data: Any, counts: dict[int, int]) -> int:
    if not isinstance(data, (list, dict)):
        return 1
    if id(data) not in counts:
        parts = data.values() if isinstance(data, dict) else data
        counts[id(data)] = 1 + sum(_count(part, counts) for part in parts)
    return counts[id(data)]
