"""How an outcome follows from the remains of a trial: its ranks' reports, exit statuses, logs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsat.engines.machines.hosts import Host
from dsat.values.outcome import Outcome, OutcomeKind
from testing.helpers import ran
from testing.local import cpu_machine
from testing.scripted_hosts import ScriptedHosts, scripted_engine, trial_of

KILLED = -signal.SIGKILL
Reports = Sequence[tuple[Outcome, float] | None]
Judge = Callable[..., Outcome]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Return a function that gives the outcome for reports in a trial's folder and exit
    statuses."""
    hosts = ScriptedHosts()
    hosts.replace_those_of(monkeypatch)

    def judge(
        reports: Reports,
        statuses: Sequence[int],
        killed: Sequence[bool] = (),
        *,
        files: Mapping[str, str | None] | None = None,
        **more: Any,
    ) -> Outcome:
        count = len(statuses)
        options = {"cold": True} | more
        engine = scripted_engine(tmp_path, [Host(cpu_machine(count))], count, **options)
        hosts.holds = True
        engine.launch(trial_of(1))
        [given] = hosts.given[1]
        for rank, report in enumerate(reports):
            if report is not None:
                outcome, time_s = report
                path = Path(given.folder) / f"rank{rank}.json"
                path.write_text(json.dumps(outcome.to_json()))
                os.utime(path, (time_s, time_s))
        for name, text in (files or {}).items():
            (Path(given.folder) / name).write_text(text or "")
        hosts.ends[1] = (statuses, killed or [False] * count)
        hosts.holds = False
        [(_, found)] = engine.poll(1)
        return found

    return judge


def said(kind: str, time_s: float, message: str = "") -> tuple[Outcome, float]:
    """Return the report of a rank, and its time."""
    message = message or f"{kind} at {time_s:g}"
    return Outcome(OutcomeKind(kind), message=message, detail=f"detail of {kind}"), time_s


LOST = said("ERROR", 1.0, "RuntimeError: Connection closed by peer")


@pytest.mark.parametrize(
    ("reports", "statuses", "kind", "message", "detail"),
    [
        # The first failure explains the others.
        ([said("ERROR", 2.0), said("ERROR", 1.0)], [1, 1], "ERROR", "rank 1: ERROR at 1", "ERROR"),
        # A peer that lost its connection may report earlier.
        ([LOST, said("OOM", 2.0)], [1, 1], "OOM", "rank 1: OOM at 2", "OOM"),
        ([said("HOST_OOM", 2.0), None], [1, 1], "HOST_OOM", "rank 0: HOST_OOM at 2", "HOST_OOM"),
    ],
)
def test_who_is_to_blame(
    reports: Reports, statuses: list[int], kind: str, message: str, detail: str, judge: Judge
) -> None:
    found = judge(reports, statuses)
    assert (found.kind, found.message) == (OutcomeKind(kind), message)
    assert found.detail == f"detail of {detail}"


@pytest.mark.parametrize(
    ("reports", "files", "steps"),
    [
        ([said("ERROR", 1.0)], {"steps": "3"}, 3),
        ([said("ERROR", 1.0)], {}, 0),
        ([said("OOM", 1.0)], {"steps": "3"}, 0),
        ([None], {"steps": "3"}, 0),  # a crash of the process
    ],
)
def test_an_error_of_the_script_has_its_completed_steps(
    judge: Judge, reports: Reports, files: dict[str, str], steps: int
) -> None:
    assert judge(reports, [-signal.SIGSEGV], files=files).completed_steps == steps


def test_a_kill_from_outside_explains_a_peers_error(judge: Judge) -> None:
    found = judge([LOST, None], [1, KILLED], files={"stderr.log": "some\nlines\n"})
    assert found.kind is OutcomeKind.HOST_OOM
    assert found.message.startswith("rank 1 was killed with SIGKILL")
    assert "--max-concurrent-trials" in found.message
    assert found.detail == "some\nlines"


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (-signal.SIGSEGV, "rank 1 was killed by SIGSEGV"),
        (-signal.SIGBUS, "rank 1 was killed by SIGBUS (is /dev/shm full?)"),
        (-40, "rank 1 was killed by signal 40"),
        (7, "rank 1 ended with exit status 7"),
        (0, "the ranks ended without a result"),
    ],
)
def test_a_rank_that_said_nothing(judge: Judge, status: int, message: str) -> None:
    found = judge([None, None], [KILLED, status], [True, False])
    assert (found.kind, found.message) == (OutcomeKind.ERROR, message)


COMMAND = {"cold": False, "command": ("bash", "run.sh")}


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (0, "ERROR", "exit status 0 after 1 optimizer step,"),
        (3, "ERROR", "exit status 3 after 1 optimizer step,"),
        (255, "ERROR", "exit status 255 after 1 optimizer step,"),  # -1
        (168, "ERROR", "exit status 168 after 1 optimizer step,"),  # no signal has the number 40
        (KILLED, "HOST_OOM", "SIGKILL"),
        (137, "HOST_OOM", "SIGKILL"),  # as a shell reports it
        (247, "HOST_OOM", "memory"),  # as DeepSpeed's launcher exits: -9 % 256
        (1, "HOST_OOM", "memory"),  # as torchrun does
    ],
)
def test_a_command_that_leaves_in_the_midst_of_its_training(
    judge: Judge, status: int, kind: str, words: str
) -> None:
    files = {"used-ports": "1", "steps": "1"}
    if status == 1:
        files["stderr.log"] = "torch.distributed.elastic: failed (exitcode: -9) local_rank: 0\n"
    found = judge([None], [status], files=files, **COMMAND)
    assert found.kind is OutcomeKind(kind) and words in found.message
    assert not found.before_engine or "before" in found.message


ACCELERATE = (
    "Fatal Python error: Segmentation fault\n"
    "Traceback (most recent call last):\n"
    '  File "/bin/accelerate", line 8, in <module>\n'
    "subprocess.CalledProcessError: Command '['python', 'train.py']' died with "
    "<Signals.SIGSEGV: 11>.\n"
)


def test_a_rank_of_accelerates_that_dies_by_a_signal_is_told(judge: Judge) -> None:
    found = judge([None], [1], files={"stderr.log": ACCELERATE}, **COMMAND)
    assert "SIGSEGV" in found.message and "exit status 1" not in found.message


def test_what_was_measured_counts_and_not_how_the_processes_ended(judge: Judge) -> None:
    metrics = json.dumps(ran(5.0).to_json())
    assert judge([None], [7], files={"metrics.json": metrics}).metrics == ran(5.0).metrics


def test_the_end_of_a_long_log_is_the_detail(judge: Judge) -> None:
    lines = [f"line {number} \u2713" for number in range(20_000)]
    found = judge([None], [7], files={"stderr.log": "\n".join(lines) + "\n"})
    assert found.detail.splitlines() == lines[-20:]
