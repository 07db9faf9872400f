"""What came of a trial, from what its ranks left behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.in_trial.rank import METRICS_FILE, result_file
from dsat.values.outcome import MemoryUse, Metrics, ModelProfile, Outcome, OutcomeKind

_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 64 * 2**10


def measured(folder: Path, duration_s: float) -> Outcome | None:
    """The outcome of a trial that measured everything; None if it did not.

    What was reported counts, not how the processes ended: one may still fail at its exit.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    profile = data["profile"]
    return Outcome(
        OutcomeKind.OK,
        metrics=Metrics.from_json(data["metrics"]),
        memory=MemoryUse(**data["memory"]),
        profile=ModelProfile.from_json(profile) if profile else None,
        duration_s=duration_s,
        warnings=tuple(data["warnings"]),
    )


def failed(
    folder: Path, statuses: Sequence[int], killed: Sequence[bool], duration_s: float
) -> Outcome:
    """The outcome of a trial that did not measure everything and was not ended from outside.

    Out of memory on any rank explains the failure of the others; else the first to fail does.

    Args:
        statuses: exit status, or minus the signal, by rank.
        killed: whether the supervisor killed it because of another rank, by rank.
    """
    log = log_tail(folder)

    def outcome(kind: OutcomeKind, message: str, detail: str = log) -> Outcome:
        return Outcome(kind, message=message, detail=detail, duration_s=duration_s)

    results = _reports(folder, len(statuses))
    for result in results:
        if result["kind"] == OutcomeKind.OOM.value:
            return outcome(OutcomeKind.OOM, _on_rank(result), result["detail"])
    died = [
        (rank, -status)
        for rank, (status, by_us) in enumerate(zip(statuses, killed, strict=True))
        if status < 0 and not by_us
    ]
    for rank, number in died:
        if number == signal.SIGKILL:
            return outcome(OutcomeKind.HOST_OOM, _host_out_of_memory(rank))
    if results:
        first = results[0]
        ended = outcome(OutcomeKind(first["kind"]), _on_rank(first), first["detail"])
        return replace(ended, smaller_may_run=first["smaller_may_run"])
    for rank, number in died:
        hint = " (is /dev/shm full?)" if number == signal.SIGBUS else ""
        name = signal.Signals(number).name
        return outcome(OutcomeKind.ERROR, f"rank {rank} was killed by {name}{hint}")
    for rank, status in enumerate(statuses):
        if status > 0:
            return outcome(OutcomeKind.ERROR, f"rank {rank} ended with exit status {status}")
    return outcome(OutcomeKind.ERROR, "the ranks ended without a result")


def _reports(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What the ranks wrote about their failures, the first to fail first."""
    found = []
    for rank in range(ranks):
        path = folder / result_file(rank)
        if path.exists():
            found.append({**json.loads(path.read_text()), "rank": rank})
    return sorted(found, key=lambda result: float(result["time"]))


def log_tail(folder: Path) -> str:
    """The end of what a trial wrote to its standard error."""
    path = folder / "stderr.log"
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:])


def _on_rank(result: dict[str, Any]) -> str:
    return f"rank {result['rank']}: {result['message']}"


def _host_out_of_memory(rank: int) -> str:
    import psutil

    total = psutil.virtual_memory().total / 2**30
    return (
        f"rank {rank} was killed with SIGKILL, most likely because the host ran out of memory "
        f"({total:.0f} GiB): run fewer trials at once (--max-concurrent-trials), offload less, or "
        "use fewer data loader workers"
    )
