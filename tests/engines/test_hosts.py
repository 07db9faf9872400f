"""Trials over several hosts; hosts that fall silent or die; supervisors that are cut off.

Some tests use fake supervisors; others use real processes on this machine.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dsat.engines import supervisors
from dsat.engines.agent import leftovers
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import Machine
from dsat.engines.supervisors import LOST, Supervisors
from dsat.errors import EngineError
from dsat.values.outcome import OutcomeKind
from testing.local import (
    PATIENCE_S,
    Bench,
    bench_of,
    buffers_of,
    cpu_machine,
    engine_of,
    hosts_here,
    is_alive,
    launch_request,
    processes_of,
    wait_until,
    warnings_of,
)
from testing.ranks_contract import facts_of

ANSWERS = """
import json, pathlib, sys
from dsat.values.files import digest
print('{"motd": "Welcome"}\\n{ maintenance tonight }\\nWelcome! ', end="")
for line in sys.stdin:
    asked = json.loads(line)
    op, files = asked["op"], asked.get("files", [])
    seen = {"digests": [digest(pathlib.Path(file)) for file in files], "is_folder": True}
    reason = "" if asked.get("device") != {"ONE": "5"} else "spoilt"
    answer = {"event": "pong" if op == "ping" else op, "reason": reason, **seen}
    print("dsat-answer", json.dumps(answer), flush=True)
"""
FALLS_SILENT = ANSWERS.replace("flush=True)", "flush=True)\n    import time\n    time.sleep(2000)")
TAKES_NOTHING = "import time; time.sleep(2000)"
LOOK = {"op": "look", "files": [], "folder": "x"}
# Like a step of a cluster: it starts the supervisor, and relays its input and output.
RELAY = """
import os, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
while chunk := os.read(0, 65536):
    os.write(child.stdin.fileno(), chunk)
"""


class Clock:
    """A clock for the supervision of hosts; only a test advances it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(supervisors, "time", clock)
    return clock


def made_up(*codes: str) -> list[Host]:
    return [
        Host(cpu_machine(1), f"host{number}", (sys.executable, "-S", "-c", code))
        for number, code in enumerate(codes)
    ]


def answered(talk: Supervisors, *hosts: int) -> dict[int, str]:
    """Wait until hosts have answered all requests; return the other hosts that are lost, and
    why."""
    lost: dict[int, str] = {}
    for host in hosts:
        talk.send(host, LOOK)
    heard: set[int] = set()
    deadline = time.monotonic() + PATIENCE_S
    while heard < set(hosts):
        assert time.monotonic() < deadline, f"only {heard} answered"
        for host, answer in talk.receive(0.1):
            if answer["event"] == LOST:
                lost[host] = answer["reason"]
            heard.add(host)
    return lost


def after_silence(talk: Supervisors, clock: Clock, *alive: int) -> dict[int, str]:
    """Advance the clock until a silent host is lost; the hosts in `alive` keep answering.

    A message that a host sent before it fell silent may be read late, and counts as an answer.
    """
    lost: dict[int, str] = {}
    for _ in range(int(supervisors.SILENT_AFTER_S / supervisors.PING_EVERY_S) + 3):
        clock.now_s += supervisors.PING_EVERY_S
        lost |= answered(talk, *alive)
    return lost


def until_lost(talk: Supervisors) -> dict[int, str]:
    def lost() -> dict[int, str]:
        events = talk.receive(0.1)
        return {host: answer["reason"] for host, answer in events if answer["event"] == LOST}

    found: dict[int, str] = wait_until(lost, "the loss of a host")
    return found


# -- signs of life


@pytest.mark.slow
def test_a_host_that_falls_silent_is_lost_and_no_other(tmp_path: Path, clock: Clock) -> None:
    hosts = made_up(ANSWERS, FALLS_SILENT, ANSWERS, TAKES_NOTHING)
    with contextlib.closing(Supervisors(hosts, tmp_path, env={})) as talk:
        assert answered(talk, 0, 1, 2) == {}
        talk.send(3, {**LOOK, "files": ["x" * 2**22]})  # far more than a pipe holds
        clock.now_s += 1000 * supervisors.SILENT_AFTER_S  # as if this process was stopped
        assert answered(talk, 0, 2) == {}, "it has heard nobody"
        lost = after_silence(talk, clock, 0, 2)
        reason = f"it has not answered for {supervisors.SILENT_AFTER_S:g} s"
        assert lost == dict.fromkeys((1, 3), reason)
        assert after_silence(talk, clock, 0, 2) == {}, "the others answer on"


def test_a_supervisor_that_dies_within_a_line_is_lost(tmp_path: Path) -> None:
    torn = 'import sys; sys.stdout.write(\'dsat-answer {"event": "en\')'
    with contextlib.closing(Supervisors(made_up(torn), tmp_path, env={})) as talk:
        [reason] = until_lost(talk).values()
        assert "ended (exit status 0" in reason


@pytest.mark.slow
def test_a_host_that_does_not_answer_a_question_is_lost_if_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = made_up(ANSWERS, TAKES_NOTHING)
    with contextlib.closing(Supervisors(hosts, tmp_path, env={})) as talk:
        answered(talk, 0)
        monkeypatch.setattr(supervisors, "_WARM_UP_LIMIT_S", 2.0)
        assert talk.warm_up() == ""
        [(host, message)] = talk.receive(0.0)
        assert (host, message["event"]) == (1, LOST)
        assert "importing torch and deepspeed took longer than 2 s" in message["reason"]


def test_ranks_are_forked_only_if_that_works_on_each_host(tmp_path: Path) -> None:
    hosts = [
        replace(host, machine=Machine("cuda", "test", (device,), ("ONE",), 2**30))
        for host, device in zip(made_up(ANSWERS, ANSWERS), "35", strict=True)
    ]
    for count, reason in ((1, ""), (2, "spoilt")):
        with contextlib.closing(Supervisors(hosts[:count], tmp_path, env={})) as talk:
            assert talk.warm_up() == reason


@pytest.mark.slow
def test_a_host_that_comes_back_ends_what_it_had(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes on this machine are left alone, as if they were on another one."""
    monkeypatch.setattr(leftovers, "end_processes", lambda run: [])
    far = Host(cpu_machine(1), "far", (sys.executable, "-c", RELAY), is_here=False)
    hosts = [*made_up(ANSWERS), far]
    with contextlib.closing(Supervisors(hosts, tmp_path, env={})) as talk:
        answered(talk, 0, 1)
        relay = psutil.Process(talk._clients[1].process.pid)  # type: ignore[union-attr]
        [supervisor] = relay.children()
        talk.send(1, launch_request(tmp_path, "/bin/sleep", "2000"))
        [trial] = wait_until(supervisor.children, "the trial")
        supervisor.suspend()
        try:
            assert "has not answered" in after_silence(talk, clock, 0)[1]
            alive = [is_alive(each.pid) for each in (relay, supervisor, trial)]
            assert alive == [False, True, True]
        finally:
            supervisor.resume()
        wait_until(lambda: not is_alive(supervisor.pid), "the supervisor's end")
        assert not is_alive(trial.pid)


# -- trials


@pytest.fixture(scope="module")
def across(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Yield a bench for trials of two ranks, on two hosts with one slot each."""
    folder = tmp_path_factory.mktemp("across")
    hosts = hosts_here(2, imported=True)
    with bench_of("behaviours", folder, slots_per_trial=2, hosts=hosts) as bench:
        yield bench


@pytest.mark.slow
def test_a_trial_over_two_hosts(across: Bench) -> None:
    trial = across.trial(stage=2)
    outcome = across.run(trial)
    assert outcome.ok, across.log(trial)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "GROUP_RANK")
    for rank, expected in enumerate(("0 0 2 1 0 0", "1 0 2 1 1 1")):
        env = facts_of(across, trial, rank)["environment"]
        assert [env[name] for name in names] == expected.split()
        assert (env["GROUP_WORLD_SIZE"], env["MASTER_ADDR"]) == ("2", "127.0.0.1")
    assert "rank 0 runs" in across.read(trial, "stdout.log")
    assert "rank 1 runs" in across.read(trial, "stdout-1.log")
    assert "# on host1\n" in across.read(trial, "cmd.txt")
    assert processes_of(across.path(trial)) == []


@pytest.mark.slow
def test_a_failure_on_one_host_ends_the_trial_on_the_other(across: Bench) -> None:
    trial = across.trial("exhausts memory on 1")
    outcome = across.run(trial)
    assert outcome.kind is OutcomeKind.OOM, outcome
    assert "rank 1: out of memory" in outcome.message
    assert outcome.duration_s < PATIENCE_S / 3, "no time-out was waited for"
    wait_until(lambda: not processes_of(across.path(trial)), "the end of both ranks")


@pytest.mark.slow
@pytest.mark.nightly
def test_hosts_that_stop_or_die_leave_the_run_and_a_trial_runs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "PING_EVERY_S", 1.0)
    monkeypatch.setattr(supervisors, "SILENT_AFTER_S", 30.0)
    with bench_of("behaviours", tmp_path, slots_per_trial=2, hosts=hosts_here(3)) as bench:
        trial = bench.trial("hangs at first")
        bench.engine.launch(trial)
        mark = tmp_path / "trials" / f"{trial.name}.began1"
        wait_until(mark.exists, "the ranks", PATIENCE_S)
        others = [bench.supervisor(host).pid for host in (0, 2)]
        first = [facts_of(bench, trial, rank)["pid"] for rank in (0, 1)]
        bench.supervisor(1).suspend()
        [(_, outcome)] = bench.engine.poll(PATIENCE_S)
        assert outcome.ok, (outcome, bench.log(trial))
        [warning] = [line for line in warnings_of(outcome) if "host" in line]
        assert warning == "host host1 is no longer used: it has not answered for 30 s"
        folders = [path.name for path in (tmp_path / "trials").iterdir() if path.is_dir()]
        assert folders == [trial.name]
        assert not any(map(is_alive, first))
        assert all(map(is_alive, others)), "supervisors of other hosts go on"
        assert "# on host2\n" in bench.read(trial, "cmd.txt")
        assert bench.engine.num_slots == 2
        again = bench.trial("hangs")
        bench.engine.launch(again)
        wait_until((bench.path(again) / "facts1.json").exists, "the ranks", PATIENCE_S)
        bench.supervisor(2).kill()
        with pytest.raises(EngineError, match=r"host host2: the process .* continue with --resume"):
            bench.engine.poll(PATIENCE_S)
    assert processes_of(tmp_path) == []
    assert buffers_of(tmp_path) == []


# A supervisor that sees other files.
SEES = """
import pathlib
from dsat.engines.agent import supervisor
digest = supervisor.digest
changed = lambda path: {answer} if path.name.startswith("{name}") else digest(path)
supervisor.digest = changed
supervisor.Supervisor().run()
"""


@pytest.mark.parametrize(
    ("name", "answer", "told"),
    [
        (".seen-", "''", r"host1 does not see the run's folder .*--run-dir"),
        ("train.py", "''", "host1 has no .*/train.py. Put it on a file system"),
        ("ds_config.json", "'f00'", "host1 has a different .*/ds_config.json than this machine"),
    ],
)
def test_hosts_with_other_files_are_refused(
    tmp_path: Path, name: str, answer: str, told: str
) -> None:
    here, there = hosts_here(2)
    code = SEES.format(name=name, answer=answer)
    there = replace(there, reach=(sys.executable, "-c", code))
    with pytest.raises(EngineError, match=told):
        engine_of("behaviours", tmp_path, hosts=[here, there])
    assert processes_of(tmp_path) == []
