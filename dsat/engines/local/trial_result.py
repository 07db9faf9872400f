"""Outcome of a trial, from the files that its ranks left."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dsat.engines.local.launch import log_files
from dsat.engines.local.running import FULL_RUN_ID, Running
from dsat.in_trial import failures
from dsat.in_trial.command_rank import PORTS_FILE
from dsat.in_trial.rank import METRICS_FILE, result_file
from dsat.values import host_memory
from dsat.values.memory_size import readable
from dsat.values.outcome import Outcome, OutcomeKind

_LOG_TAIL_LINES = 20
_LOG_TAIL_BYTES = 64 * 2**10
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second is what shells say of it
_KILLED_FOR_MEMORY = "was killed with SIGKILL, most likely because the host ran out of memory"


def of(running: Running, *, timeout_s: float) -> Outcome:
    """The outcome of a run whose ranks have all ended.

    Args:
        timeout_s: what it was allowed to take.
    """
    folder, statuses = running.folder, running.by_rank("statuses")
    duration_s = round(time.monotonic() - running.began_s, 3)
    done = running.trial.id == FULL_RUN_ID and not any(statuses)
    if done:
        return Outcome(OutcomeKind.OK, duration_s=duration_s)
    found = measured(folder, duration_s)
    if found is not None:
        return found
    if running.canceled:
        return Outcome(OutcomeKind.CANCELED, duration_s=duration_s)
    if running.timed_out:
        return too_slow(folder, timeout_s, duration_s)
    if running.lost:
        return Outcome(OutcomeKind.ERROR, message=running.lost, duration_s=duration_s)
    if running.by_command:
        return command_failed(folder, statuses[0], duration_s)
    ranks_per_host = running.shares[0].ranks
    killed = running.by_rank("killed")
    return failed(folder, statuses, killed, duration_s, ranks_per_host=ranks_per_host)


def too_slow(folder: Path, timeout_s: float, duration_s: float) -> Outcome:
    """Outcome of a trial that was ended because of its time."""
    return Outcome(
        OutcomeKind.TIMEOUT,
        message=f"no result after {timeout_s:g} s; raise --trial-timeout?",
        detail=log_tail(folder),
        duration_s=duration_s,
    )


def measured(folder: Path, duration_s: float) -> Outcome | None:
    """The outcome of a trial that measured everything; None if it did not.

    What was reported counts, not how the processes ended: one may still fail at its exit.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return None
    found = _read(path)
    if found is None or (found.ok and found.metrics is None and found.profile is None):
        message = f"{path.name} in the trial's folder is not as dsat wrote it: does the script?"
        found = Outcome(OutcomeKind.INVALID, message=message)
    return replace(found, duration_s=duration_s)


def failed(
    folder: Path,
    statuses: Sequence[int],
    killed: Sequence[bool],
    duration_s: float,
    *,
    ranks_per_host: int,
) -> Outcome:
    """The outcome of a trial that did not measure everything and was not ended from outside.

    Out of memory on any rank explains the failure of the others; else the first to fail does.

    Args:
        statuses: exit status, or minus the signal, by rank.
        killed: whether the supervisor killed it because of another rank, by rank.
        ranks_per_host: ranks that print to the same log.
    """
    reports = told(folder, duration_s)
    for outcome in reports:
        if outcome.kind is OutcomeKind.OOM:
            return outcome

    def untold(kind: OutcomeKind, message: str, rank: int = 0) -> Outcome:
        log = log_tail(folder, rank // ranks_per_host)
        return Outcome(kind, message=message, detail=log, duration_s=duration_s)

    died = [
        (rank, -status)
        for rank, (status, by_us) in enumerate(zip(statuses, killed, strict=True))
        if status < 0 and not by_us
    ]
    for rank, number in died:
        if number == signal.SIGKILL:
            return untold(OutcomeKind.HOST_OOM, _host_out_of_memory(rank), rank)
    if reports:
        return reports[0]
    for rank, number in died:
        hint = " (is /dev/shm full?)" if number == signal.SIGBUS else ""
        name = signal.Signals(number).name
        return untold(OutcomeKind.ERROR, f"rank {rank} was killed by {name}{hint}", rank)
    for rank, status in enumerate(statuses):
        if status > 0:
            message = f"rank {rank} ended with exit status {status}"
            return untold(OutcomeKind.ERROR, message, rank)
    return untold(OutcomeKind.ERROR, "the ranks ended without a result")


def command_failed(folder: Path, status: int, duration_s: float) -> Outcome:
    """The same of a trial that runs the user's whole command.

    Args:
        status: exit status of the command, or minus the signal.
    """
    reports = told(folder, duration_s)
    for outcome in reports:
        if outcome.kind is OutcomeKind.OOM:
            return outcome
    if reports:
        return reports[0]
    log = log_tail(folder)
    kind, how = failures.of_text(log), f"ended with exit status {status}"
    if status in _KILLED and kind is OutcomeKind.ERROR:
        kind, how = OutcomeKind.HOST_OOM, _KILLED_FOR_MEMORY
    elif status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    before_engine = not (folder / PORTS_FILE).exists()
    when = "before it called deepspeed.initialize" if before_engine else "before it was measured"
    return Outcome(
        kind,
        message=f"your command {how} {when}",
        detail=log,
        duration_s=duration_s,
        before_engine=before_engine,
    )


def told(folder: Path, duration_s: float) -> list[Outcome]:
    """Return the failures that ranks reported, the first to fail first."""
    found = []
    for path in folder.glob(result_file("*")):
        outcome = _read(path)
        if outcome is not None:
            rank = path.stem.removeprefix("rank")
            outcome = replace(outcome, message=f"rank {rank}: {outcome.message}")
            found.append(
                (path.stat().st_mtime_ns, path.name, replace(outcome, duration_s=duration_s))
            )
    return [outcome for *_, outcome in sorted(found, key=lambda entry: entry[:2])]


def _read(path: Path) -> Outcome | None:
    """The outcome in a file, where also scripts may write; None if it holds none."""
    try:
        return Outcome.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def log_tail(folder: Path, cross_rank: int = 0) -> str:
    """The end of what a trial's ranks on a host wrote to their standard error.

    Args:
        cross_rank: the host's number among those of the trial.
    """
    path = folder / log_files(cross_rank)[1]
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:])


def _host_out_of_memory(rank: int) -> str:
    total = readable(host_memory.total_bytes(), whole=True)
    return (
        f"rank {rank} {_KILLED_FOR_MEMORY} ({total}): run fewer trials at once "
        "(--max-concurrent-trials), offload less, or use fewer data loader workers"
    )
