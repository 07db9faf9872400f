"""What the search runner hands to whoever follows it, through its log.

The log is the only way that needs no access to the cluster's storage. Its lines may not be long, so
the result is compressed and goes on several.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dsat.report import summary
from dsat.report.verdict import verdict
from dsat.tuning.run import Run
from dsat.values.text import values_without_secrets

RESULT_MARK = "[dsat-result] "
_LONGEST_PART = 3000


def of_run(run: Run, *, over: bool) -> dict[str, Any]:
    """The result for programs, as `--json` prints it, without what looks like a secret.

    Args:
        over: the search came to its own end.
    """
    told = summary.to_json(run, Path())
    del told["run_dir"]  # which is nowhere to be looked into
    told.update(over=over, best_value=run.best_value, verdict=verdict(run))
    found: dict[str, Any] = values_without_secrets(told)
    return found


def to_lines(result: Mapping[str, Any]) -> list[str]:
    """The lines of a log that hold a result."""
    packed = zlib.compress(json.dumps(result, separators=(",", ":")).encode(), level=9)
    text = base64.b64encode(packed).decode()
    parts = [text[start : start + _LONGEST_PART] for start in range(0, len(text), _LONGEST_PART)]
    return [f"{RESULT_MARK}{n}/{len(parts)} {part}" for n, part in enumerate(parts, start=1)]


def of_lines(lines: Iterable[str]) -> dict[str, Any]:
    """The last whole result of a log, whatever else is in it; empty if there is none."""
    parts: list[str] = []
    result: dict[str, Any] = {}
    for line in lines:
        _, mark, rest = line.partition(RESULT_MARK)
        number, _, part = rest.strip().partition(" ")
        place, _, count = number.partition("/")
        if not mark or not place.isdecimal() or not count.isdecimal():
            continue
        parts = [*parts, part] if len(parts) == int(place) - 1 else [part][int(place) - 1 :]
        if len(parts) == int(count):
            result = _unpacked("".join(parts)) or result
            parts = []
    return result


def _unpacked(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except (binascii.Error, zlib.error, ValueError):  # torn, or another program's
        return None
    return found if isinstance(found, dict) else None
