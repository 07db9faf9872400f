"""Outcome of a cluster's trial, from its report or its log."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsat.in_trial import failures
from dsat.in_trial.cluster_rank import ATTACHED_MARK, LOG_MARK, OUTCOME_KEY
from dsat.values.codec import DecodeError
from dsat.values.outcome import Outcome, OutcomeKind

_TAIL_LINES = 20
# Texts by which the master, Kubernetes or determined's launchers report a killed process.
_KILLED = ("exit code: 137", "exit code 137", "OOMKilled", "died with <Signals.SIGKILL")
_INVALID_HP = "InvalidHP"
_ADDRESS_IN_USE = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt|InvalidHP)\b(?:: .*)?")
_SCRIPT = (
    "Does the script call dsat.get_ds_config_from_hparams (or dsat.get_hf_args_with_overwrites), "
    "and does it train inside dsat.dsat_reporting_context?"
)


def from_metric(metric: Any) -> Outcome:
    """Return the outcome that a trial reported as searcher metric; INVALID for any other metric."""
    report = metric.get(OUTCOME_KEY) if isinstance(metric, dict) else None
    if report is not None:
        try:
            return Outcome.from_json(report)
        except DecodeError as error:
            message = f"the trial's report is damaged: {error}"
            return Outcome(OutcomeKind.INVALID, message=message)
    return Outcome(
        OutcomeKind.INVALID,
        message="the script reported its own searcher metric, "
        f"{json.dumps(metric)}, but dsat measured nothing. {_SCRIPT}",
    )


def from_log(messages: Sequence[str], *, failed: bool) -> Outcome:
    """Return the outcome of a trial that reported no metric, from its log.

    `failed` is whether the master reports a failure; otherwise, the script may just have ended.
    """
    lines = [line for message in messages for line in _strip_prefix(message)]
    plain = [line for line in lines if LOG_MARK not in line and ATTACHED_MARK not in line]
    outcome = _outcome_of_lines(lines, plain, failed=failed)
    everything = "\n".join([outcome.message, outcome.detail, *plain])
    if outcome.kind is not OutcomeKind.ERROR or not _ADDRESS_IN_USE.search(everything):
        return outcome
    return replace(
        outcome,
        message="another program uses the port of the ranks (EADDRINUSE). With host networking, "
        "two trials on one host use the same port. Run one trial at a time "
        "(--max-concurrent-trials 1), or give each trial all slots of a host",
    )


def _outcome_of_lines(lines: Sequence[str], plain: Sequence[str], *, failed: bool) -> Outcome:
    reports = _reports(lines)
    for data in reports:
        if data["kind"] == OutcomeKind.OK.value:
            return Outcome.from_json(data)
    # A script that fails also reports its end, but not the exception, which its log has.
    telling = [data for data in reports if not (failed and data["ended"])]
    if telling:
        # Out of memory on one rank explains the failures of the others.
        first = min(telling, key=lambda data: data["kind"] != OutcomeKind.OOM.value)
        return Outcome.from_json(first)
    text, tail = "\n".join(plain), "\n".join(plain[-_TAIL_LINES:])
    if failed:
        kind = failures.classify_text(text)
        if kind.is_out_of_memory:
            return Outcome(kind, message="out of memory, according to its log", detail=tail)
        if any(mark in text for mark in _KILLED):
            return Outcome(
                OutcomeKind.HOST_OOM,
                message="a rank was killed with SIGKILL, most likely because its host ran out of "
                "memory",
                detail=tail,
            )
        return _crash(lines, plain, reports)
    if _INVALID_HP in text:
        return Outcome(OutcomeKind.INVALID, message="the script raised InvalidHP", detail=tail)
    message = f"the trial ended without a report. {_SCRIPT}"
    return Outcome(OutcomeKind.INVALID, message=message, detail=tail)


def reason_of_failure(messages: Sequence[str]) -> str:
    """Return the last exception in a log, or the log's last line if there is no exception."""
    lines = [line for message in messages for line in _strip_prefix(message) if line.strip()]
    return _last_exception(lines) or (lines[-1] if lines else "")


def _crash(
    lines: Sequence[str], plain: Sequence[str], reports: Sequence[Mapping[str, Any]]
) -> Outcome:
    """Return the outcome of a script that failed, from its log alone."""
    exception = _last_exception(plain)
    tail = "\n".join(_last_traceback(plain) or plain[-_TAIL_LINES:])
    if reports and not exception:  # for example, a launcher failed after its ranks had ended
        ended = Outcome.from_json(reports[0])
        return replace(ended, detail=ended.detail or tail)
    if reports:
        before_engine = all(data.get("before_engine") for data in reports)
    else:
        # A process that dies silently may have created its engine.
        before_engine = bool(exception) and not any(ATTACHED_MARK in line for line in lines)
    return Outcome(
        OutcomeKind.ERROR,
        message=exception or "the trial failed",
        detail=tail,
        before_engine=before_engine,
    )


def _reports(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the ranks' reports in a log; drop reports of earlier runs of the trial."""
    reports = []
    for line in lines:
        _, mark, text = line.partition(LOG_MARK)
        if mark:
            try:
                data = json.loads(text)
                Outcome.from_json(data)
            except ValueError:  # mixed with a line of another writer, or damaged
                continue
            reports.append(data)
    return [data for data in reports if data["run"] == reports[-1]["run"]]


def _strip_prefix(message: str) -> list[str]:
    _, bars, text = message.partition("|| ")
    return (text if bars else message).splitlines()


def _last_exception(lines: Sequence[str]) -> str:
    for line in reversed(lines):
        match = _EXCEPTION.match(_strip_rank(line))
        if match:
            return match[0]
    return ""


def _last_traceback(lines: Sequence[str]) -> list[str]:
    starts = [n for n, line in enumerate(lines) if _strip_rank(line).startswith(_TRACEBACK)]
    if not starts:
        return []
    tail = [_strip_rank(line) for line in lines[starts[-1] :]]
    end = next((n for n, line in enumerate(tail) if n and line[:1] not in ("", " ")), len(tail))
    return tail[: end + 1]


def _strip_rank(line: str) -> str:
    """Return a line without a launcher's prefix (`[rank0]: `)."""
    return (line.startswith("[") and line.partition("]: ")[2]) or line
