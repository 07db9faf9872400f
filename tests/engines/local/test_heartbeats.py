"""Hosts that fall silent, and supervisors that are cut off: made-up ones, and real processes."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dsat.engines.local import heartbeats, leftovers, supervisors
from dsat.engines.local.hosts import Host
from dsat.engines.local.machine import Machine
from dsat.engines.local.supervisors import LOST, Supervisors
from testing.local import PATIENCE_S, bench_of, cpu_machine, is_alive, launch_request, wait_until

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
# What a step of a cluster is: it starts the supervisor, and hands on what both ends say.
RELAY = """
import os, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
while chunk := os.read(0, 65536):
    os.write(child.stdin.fileno(), chunk)
"""

# Within it a host that is alive answers on a loaded machine, too.
SILENT_S = 5.0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "PING_EVERY_S", 0.1)
    monkeypatch.setattr(heartbeats, "SILENT_AFTER_S", SILENT_S)


def made_up(*codes: str) -> list[Host]:
    return [
        Host(cpu_machine(1), f"host{number}", (sys.executable, "-S", "-c", code))
        for number, code in enumerate(codes)
    ]


def settle(talk: Supervisors, *hosts: int) -> None:
    """Waits until hosts have begun to answer."""
    for host in hosts:
        talk.send(host, LOOK)
    heard: set[int] = set()
    while heard < set(hosts):
        heard |= {host for host, _ in talk._read(10.0)}


def until_lost(talk: Supervisors, host: int, limit_s: float = PATIENCE_S) -> str:
    """Why a host is lost, and no other."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for number, answer in talk.receive(1.0):
            if answer["event"] == LOST:
                assert number == host
                return str(answer["reason"])
    raise AssertionError(f"host {host} was not lost within {limit_s:g} s")


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_host_that_falls_silent_is_lost_and_no_other(tmp_path: Path) -> None:
    hosts = made_up(ANSWERS, FALLS_SILENT, ANSWERS, TAKES_NOTHING)
    with contextlib.closing(Supervisors(hosts, tmp_path, env={})) as talk:
        settle(talk, 0, 1, 2)
        talk.send(3, {**LOOK, "files": ["x" * 2**22]})  # far more than a pipe holds
        lost: dict[int, str] = {}
        while len(lost) < 2:
            lost |= {host: message["reason"] for host, message in talk.receive(1.0)}
        assert lost == dict.fromkeys((1, 3), f"it has not answered for {SILENT_S:g} s")
        for _ in range(20):  # the others answer on
            assert talk.receive(0.1) == []


def test_a_supervisor_that_dies_within_a_line_is_lost(tmp_path: Path) -> None:
    torn = 'import sys; sys.stdout.write(\'dsat-answer {"event": "en\')'
    with contextlib.closing(Supervisors(made_up(torn), tmp_path, env={})) as talk:
        assert "ended (exit status 0" in until_lost(talk, 0)


@pytest.mark.slow
def test_a_trial_launched_on_a_host_that_was_just_lost_runs_on_another(tmp_path: Path) -> None:
    reads = ANSWERS.replace('op == "ping"', 'op != "look"')
    with bench_of("behaviours", tmp_path, hosts=made_up(reads, reads), cold=True) as bench:
        talk = bench.engine._supervisors
        talk._clients[0]._process.kill()
        assert list(talk._ask(dict.fromkeys(talk._clients, LOOK), PATIENCE_S)) == [1]
        trial = bench.trial()
        bench.engine.launch(trial)
        assert bench.engine.poll(2.0) == []
        assert bench.engine._running[trial.id].hosts == {1}


@pytest.mark.slow
def test_a_host_that_does_not_answer_a_question_is_lost_if_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "_WARM_UP_LIMIT_S", SILENT_S)
    hosts = made_up(ANSWERS, TAKES_NOTHING)
    with contextlib.closing(Supervisors(hosts, tmp_path, env={})) as talk:
        assert talk.warm_up() == ""
        reason = f"importing torch and deepspeed took longer than {SILENT_S:g} s"
        assert talk.receive(0.0) == [(1, {"event": LOST, "reason": reason})]


def test_ranks_are_forked_only_if_that_works_on_each_host(tmp_path: Path) -> None:
    hosts = [
        replace(host, machine=Machine("cuda", "test", (device,), ("ONE",), 2**30))
        for host, device in zip(made_up(ANSWERS, ANSWERS), "35", strict=True)
    ]
    for count, reason in ((1, ""), (2, "spoilt")):
        with contextlib.closing(Supervisors(hosts[:count], tmp_path, env={})) as talk:
            assert talk.warm_up() == reason


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_host_that_comes_back_ends_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of it is on this machine stays alone, as if it were on another one."""
    monkeypatch.setattr(leftovers, "end_processes", lambda run: [])
    far = Host(cpu_machine(1), "far", (sys.executable, "-c", RELAY), is_here=False)
    hosts = [*made_up(ANSWERS), far]
    with contextlib.closing(Supervisors(hosts, tmp_path, env={})) as talk:
        settle(talk, 0, 1)
        relay = psutil.Process(talk._clients[1]._process.pid)
        [supervisor] = relay.children()
        talk.send(1, launch_request(tmp_path, "/bin/sleep", "2000"))
        [trial] = wait_until(supervisor.children, "the trial")
        supervisor.suspend()
        try:
            assert "has not answered" in until_lost(talk, 1)
            alive = [is_alive(each.pid) for each in (relay, supervisor, trial)]
            assert alive == [False, True, True]
        finally:
            supervisor.resume()
        wait_until(lambda: not is_alive(supervisor.pid), "the supervisor's end")
        assert not is_alive(trial.pid)
