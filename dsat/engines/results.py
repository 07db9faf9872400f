"""The outcome of a trial, read from the files of its ranks."""

from __future__ import annotations

import itertools
import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

from dsat.engines.running import Running
from dsat.engines.start import FULL_RUN_ID, StartMethod
from dsat.engines.trial_folder import check_space, log_files, read_end
from dsat.in_trial import failures
from dsat.in_trial.rank_files import METRICS_FILE, PORTS_FILE, read_steps, result_file
from dsat.values import format as fmt
from dsat.values import host_limits
from dsat.values.outcome import Outcome, OutcomeKind

_LOG_TAIL_LINES = 20
# The last line of a traceback as Python prints it, also after prefixes such as "[rank0]: ".
ERROR = re.compile(r"(\[\w+\]:\s?)*[A-Za-z_][\w.]*(Error|Exception|Exit): ")
_TRACEBACK = "Traceback (most recent call last):"
_ONLY_A_STATUS = re.compile(r"ended with (exit status |sys\.exit\()\d+")
# Exceptions that torchrun and accelerate add when a rank has failed.
_LAUNCHERS = ("torch.distributed.elastic.", "subprocess.CalledProcessError: ")
_LOGGED_BY_LAUNCHER = re.compile(r"torch[./]distributed[./]elastic")
# How launchers log the end of the first rank that failed.
_EXIT_OF_RANK = re.compile(
    r"exitcode\s*: (?P<torchrun>-?\d+)|exits with return code = (?P<deepspeed>-?\d+)"
    r"|died with <Signals\.\w+: (?P<accelerate>\d+)>"
)
_SIGNALS = frozenset(map(int, signal.Signals))  # some numbers below 64 have no name
# Signals N that an exit status of 256 - N indicates; not 1, as programs may exit with -1 (255).
_CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
_KILLED_FOR_MEMORY = "was killed with SIGKILL, most likely because the host ran out of memory"


def read_outcome(running: Running, *, timeout_s: float) -> Outcome:
    """Return the outcome of a trial whose ranks have all ended.

    A measurement counts whatever the exit statuses are, since a process may fail later, at its
    exit. A full-length run, which measures nothing, is OK if all statuses are 0.

    Raises:
        OSError: the trial failed and its disk is full; it has no outcome, so a resumed run
            repeats it.
    """
    folder = running.folder
    duration_s = round(time.monotonic() - running.began_s, 3)
    if running.trial.id == FULL_RUN_ID and not status_of(running):
        return Outcome(OutcomeKind.OK, duration_s=duration_s)
    measured = _read(folder / METRICS_FILE)
    if measured is not None:
        outcome = measured
    elif running.canceled:
        outcome = Outcome(OutcomeKind.CANCELED)
    elif running.timed_out:
        message = f"no result after {timeout_s:g} s; raise --trial-timeout?"
        outcome = Outcome(OutcomeKind.TIMEOUT, message=message, detail=log_tail(folder))
    elif running.lost:
        outcome = Outcome(OutcomeKind.ERROR, message=running.lost)
    else:
        reports = read_reports(folder, duration_s)
        outcome = _failure(running, reports)
        if outcome.kind is OutcomeKind.ERROR and running.trial.id != FULL_RUN_ID:
            check_space(folder)
        detail = outcome.detail if outcome in reports else ""
        if outcome in reports and outcome.kind is OutcomeKind.ERROR:
            outcome = replace(outcome, completed_steps=read_steps(folder) or 0)
        if outcome.kind is OutcomeKind.ERROR and _ONLY_A_STATUS.search(outcome.message):
            outcome = replace(outcome, message=outcome.message + _quote_last_line(folder, detail))
    return replace(outcome, duration_s=duration_s)


def status_of(running: Running) -> int:
    """Return the first nonzero exit status of a trial's processes, or 0; negative for a signal."""
    return next(filter(None, running.collect_by_rank("statuses")), 0)


def _failure(running: Running, reports: list[Outcome]) -> Outcome:
    """Return the outcome of a trial that ended by itself before it was measured.

    The first of these that exists decides: a report of OOM, which explains the failures of other
    ranks; a rank killed with SIGKILL; the earliest report; a signal or exit status.
    """
    out_of_memory = [outcome for outcome in reports if outcome.kind is OutcomeKind.OOM]
    if out_of_memory:
        return out_of_memory[0]
    if running.method is StartMethod.COMMAND and not running.start.own_ranks:
        return _read_command_outcome(running, reports)
    killed, statuses = running.collect_by_rank("killed"), running.collect_by_rank("statuses")
    signals = {
        rank: -status
        for rank, status in enumerate(statuses)
        if status < 0 and not killed[rank]  # by the supervisor, after another rank failed
    }
    kind, rank, message = OutcomeKind.ERROR, 0, "the ranks ended without a result"
    if signal.SIGKILL in signals.values():
        kind = OutcomeKind.HOST_OOM
        rank = next(rank for rank, number in signals.items() if number == signal.SIGKILL)
        total = fmt.memory(host_limits.total_bytes(), whole=True)
        message = (
            f"rank {rank} {_KILLED_FOR_MEMORY} ({total}): run fewer trials at once "
            "(--max-concurrent-trials), offload less, or use fewer data loader workers"
        )
    elif reports:
        return reports[0]
    elif signals:
        rank, number = next(iter(signals.items()))
        hint = " (is /dev/shm full?)" if number == signal.SIGBUS else ""
        name = signal.Signals(number).name if number in _SIGNALS else f"signal {number}"
        message = f"rank {rank} was killed by {name}{hint}"
    elif any(status > 0 for status in statuses):
        rank = next(rank for rank, status in enumerate(statuses) if status > 0)
        message = f"rank {rank} ended with exit status {statuses[rank]}"
    log = log_tail(running.folder, rank // running.shares[0].ranks)
    return Outcome(kind, message=message, detail=log)


def _read_command_outcome(running: Running, reports: list[Outcome]) -> Outcome:
    folder = running.folder
    number = signal_of_rank(running)
    if reports and number != signal.SIGKILL:
        return reports[0]
    log = log_tail(folder)
    kind = failures.classify_text(log)
    if number == signal.SIGKILL and kind is OutcomeKind.ERROR:
        kind = OutcomeKind.HOST_OOM
    before_engine = not (folder / PORTS_FILE).exists()
    phase = "before it called deepspeed.initialize" if before_engine else "before it was measured"
    if steps := read_steps(folder):
        phase = f"after {fmt.count(steps, 'optimizer step')}, {phase}"
    end = "your command ran out of memory" if kind is OutcomeKind.OOM else describe_end(running)
    message = f"{end} {phase}"
    return Outcome(kind, message=message, detail=log, before_engine=before_engine)


def _quote_last_line(folder: Path, detail: str) -> str:
    """Return ": " and the last line that the script wrote to standard error.

    Return an empty text if standard error has a traceback. `shown` is text that the forked rank,
    not the script, wrote there.
    """
    log = "\n".join(_read_log(folder)).replace(detail.strip(), "").strip()
    lines = [line for line in log.splitlines() if "%|" not in line]  # no progress bars
    last = "".join(lines[-1:]).strip().replace(str(folder.resolve()), "<trial>")
    return f": {last}" if last and _TRACEBACK not in log else ""


def describe_end(running: Running) -> str:
    """Return a clause on the end of the user's command: a signal or its exit status."""
    number = signal_of_rank(running)
    if number is None:
        return f"your command ended with exit status {status_of(running)}"
    if number == signal.SIGKILL:
        return f"a rank of your command {_KILLED_FOR_MEMORY}"
    return f"a rank of your command was killed by {signal.Signals(number).name}"


def signal_of_rank(running: Running) -> int | None:
    """Return the signal that ended the first failed rank of a command; None if none did.

    Launchers log it (DeepSpeed's launcher on standard output). If signal N ended a command, its
    exit status is -N, 128 + N (shells), or 256 - N.
    """
    for line in itertools.chain(*(read_end(running.folder / name) for name in log_files(0)[::-1])):
        if match := _EXIT_OF_RANK.search(line):
            [number] = filter(None, match.groups())
            status = int(number) if match["accelerate"] is None else -int(number)
            return -status if -status in _SIGNALS else None
    if all(running.collect_by_rank("killed")):
        return None
    status = status_of(running)
    if 256 - status in _CRASHES:
        return 256 - status
    return next((number for number in (-status, status - 128) if number in _SIGNALS), None)


def read_reports(folder: Path, duration_s: float) -> list[Outcome]:
    """Return the failures that ranks reported, the earliest first, each with this `duration_s`."""
    entries = []
    for path in folder.glob(result_file("*")):
        outcome = _read(path)
        if outcome is not None:
            message = f"rank {path.stem.removeprefix('rank')}: {outcome.message}"
            outcome = replace(outcome, message=message, duration_s=duration_s)
            entries.append((path.stat().st_mtime_ns, path.name, outcome))
    return [outcome for *_, outcome in sorted(entries, key=lambda entry: entry[:2])]


def _read(path: Path) -> Outcome | None:
    try:
        return Outcome.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def log_tail(folder: Path, cross_rank: int = 0) -> str:
    """Return the last lines of the standard error of a trial's ranks on one host.

    `cross_rank`: position of the host among the trial's hosts.
    """
    return "\n".join(_read_log(folder, cross_rank)[-_LOG_TAIL_LINES:])


def _read_log(folder: Path, cross_rank: int = 0) -> list[str]:
    """Return the end of standard error, without a launcher's report of the failure.

    The report may be longer than the rank's own error.
    """
    lines = read_end(folder / log_files(cross_rank)[1])
    launchers = next((n for n, line in enumerate(lines) if line.startswith(_LAUNCHERS)), None)
    if launchers is not None and _TRACEBACK in lines[:launchers]:
        while lines.pop() != _TRACEBACK or len(lines) > launchers:
            pass
        while lines and _LOGGED_BY_LAUNCHER.search(lines[-1]):
            lines.pop()
    return lines
