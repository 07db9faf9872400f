"""Result of a search, as the runner leaves it: in its log, its description and its metrics.

The log is the only way to the client that needs no access to the cluster's storage. Its lines may
not be long, so the result is compressed and split.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dsat.report import format as fmt
from dsat.report import summary
from dsat.report.run_view import RunView, best_config
from dsat.report.verdict import gain, say_gain, verdict
from dsat.tuning.run import Run
from dsat.values.text import printable, values_without_secrets

TRAIN_LINE = "see best_ds_config.json"
RESULT_MARK = "[dsat-result] "
FAILED_METRIC = "search_failed"  # 1 or 0, beside the best value, in what the web UI summarises
_LONGEST_PART = 3000
_LONGEST_DESCRIPTION = 250


def of_run(run: Run, *, over: bool) -> dict[str, Any]:
    """Return the result as `--json` prints it, without secrets.

    `over` says whether the search came to its own end.
    """
    told = RunView.of(run).to_json(Path())
    del told["run_dir"]  # it ends with the container
    told.update(over=over, best_value=run.best_value, verdict=verdict(run))
    found: dict[str, Any] = values_without_secrets(told)
    return found


def files(run: Run) -> dict[str, str]:
    """Return the texts of the result files, without secrets, by their names."""
    return {
        name: json.dumps(values_without_secrets(json.loads(text)), indent=2) + "\n"
        if name.endswith(".json")
        else text
        for name, text in summary.texts(run, TRAIN_LINE).items()
    }


def to_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of a log that hold a result."""
    packed = zlib.compress(json.dumps(result, separators=(",", ":")).encode(), level=9)
    text = base64.b64encode(packed).decode()
    parts = [text[start : start + _LONGEST_PART] for start in range(0, len(text), _LONGEST_PART)]
    return [f"{RESULT_MARK}{n}/{len(parts)} {part}" for n, part in enumerate(parts, start=1)]


def of_lines(lines: Iterable[str]) -> dict[str, Any]:
    """Return the last whole result of a log; empty if there is none."""
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


def for_people(run: Run) -> list[str]:
    """Return the verdict; of a search that found nothing, with the script's own last words."""
    told = verdict(run)
    if run.best is None:
        details = [outcome.detail for outcome in run.outcomes.values() if outcome.detail]
        told = [*(details[-1].splitlines() if details else []), *told]
    best = best_config(run)
    if best is not None:
        told.append(f"best_ds_config.json: {json.dumps(values_without_secrets(best))}")
    return told


def description(own: str, run: Run, *, over: bool, canceled: bool = False) -> str:
    """Return the runner's description at its end, after the user's own."""
    parts = [own, _end_in_words(run, over, canceled)]
    return printable(" - ".join(filter(None, parts)))[:_LONGEST_DESCRIPTION]


def _end_in_words(run: Run, over: bool, canceled: bool) -> str:
    if over and run.best is None:
        return f"FAILED: {run.stop_reason}"
    found, outcome = "nothing was measured", run.best_outcome
    if run.best is not None and outcome is not None and run.plan is not None:
        found = f"best {run.best.name}, {fmt.outcome(outcome, run.plan.metric)}"
        confirmed = gain(run)
        if confirmed is not None and run.best is not run.baseline:
            found += f", {say_gain(confirmed)} your own"
    if canceled:
        return f"canceled; {found}"
    return found if over else f"ended from outside; {found}"


def metrics(run: Run, *, over: bool) -> dict[str, Any]:
    """Return the last validation metrics of the runner's trial."""
    assert run.plan is not None
    found: dict[str, Any] = {FAILED_METRIC: int(over and run.best is None)}
    if run.best_value is not None:
        found[run.plan.metric] = run.best_value
    return found
