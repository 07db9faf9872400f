"""Result of a search in the runner's log, in its experiment's description and in its metrics.

A client without access to the cluster's storage can read the result only from the log. Lines of the
log must be short, so the result is compressed and split.
"""

from __future__ import annotations

import base64
import contextlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsat.determined_cluster.job import Job
from dsat.run.events import EVENT_START, VALUES_OF
from dsat.show import summary
from dsat.show.view import RunView
from dsat.values.text import hide_secrets_in_values, printable

RESULT_MARK = "[dsat-result] "
FAILED_METRIC = "search_failed"  # 1 or 0, in the metrics that the web UI shows
_LONGEST_PART = 3000
_LONGEST_DESCRIPTION = 250


def to_json(view: RunView, *, over: bool) -> dict[str, Any]:
    """Return the result that `--json` prints, without secrets, and whether the search is `over`."""
    values = view.to_json(Path())
    del values["run_dir"]  # the folder vanishes with the container
    public: dict[str, Any] = hide_secrets_in_values({**values, "over": over})
    return public


def events_to_json(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the events of a run for the log, without secrets and without the plan.

    The plan holds the user's configuration. `restore_events` adds it from the job.
    """
    rows: list[dict[str, Any]] = [dict(event) for event in events if event["event"] in VALUES_OF]
    for row in rows:
        if row["event"] == EVENT_START:
            del row["plan"]
    hidden: list[dict[str, Any]] = hide_secrets_in_values(rows)
    return hidden


def restore_events(events: Sequence[Mapping[str, Any]], job: Job) -> list[dict[str, Any]]:
    """Return the events of a log with the job's plan, which `events_to_json` had removed."""
    plan = {"plan": job.plan.to_json()}
    return [{**event, **plan} if event["event"] == EVENT_START else {**event} for event in events]


def to_lines(result: Mapping[str, Any]) -> list[str]:
    """Return a result as lines of a log."""
    packed = zlib.compress(json.dumps(result, separators=(",", ":")).encode(), level=9)
    text = base64.b64encode(packed).decode()
    parts = [text[start : start + _LONGEST_PART] for start in range(0, len(text), _LONGEST_PART)]
    return [f"{RESULT_MARK}{n}/{len(parts)} {part}" for n, part in enumerate(parts, start=1)]


def from_lines(lines: Iterable[str]) -> dict[str, Any]:
    """Return the last complete result in a log; empty if there is none."""
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
            # The text may be torn, or another program's.
            with contextlib.suppress(zlib.error, ValueError, TypeError):
                packed = base64.b64decode("".join(parts), validate=True)
                result = dict(json.loads(zlib.decompress(packed)))
            parts = []
    return result


def text_lines(view: RunView) -> list[str]:
    """Return the verdict and best configuration; without one, the last error and the verdict."""
    if view.best is None:
        details = [v.outcome.detail for v in view.ended if v.outcome]
        last = next(filter(None, reversed(details)), "")
        return [*last.splitlines(), *view.verdict.lines]
    best = json.dumps(hide_secrets_in_values(view.best_config))
    return [*view.verdict.lines, f"{summary.BEST_CONFIG_FILE}: {best}"]


def description(own: str, view: RunView, reason: str | None, *, canceled: bool = False) -> str:
    """Return the final description of the runner's experiment: the user's text, then the result.

    `reason` says why the search ended; None if it was canceled or ended from outside.
    """
    text = view.verdict.headline if view.best is not None else "nothing was measured"
    if reason is not None and view.best is None:
        text = f"FAILED: {reason}"
    elif canceled:
        text = f"canceled; {text}"
    elif view.stop_reason is None:
        text = f"{reason or 'ended from outside'}; {text}"
    return printable(f"{own} - {text}" if own else text)[:_LONGEST_DESCRIPTION]
