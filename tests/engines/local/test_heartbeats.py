"""Hosts that fall silent, and supervisors that are cut off: made-up ones, and real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from dsat.engines.local import heartbeats, leftovers, supervisors
from dsat.engines.local.heartbeats import Heartbeats, ListeningClock
from dsat.engines.local.hosts import Host
from dsat.engines.local.machine import Machine
from dsat.engines.local.supervisors import LOST, Supervisors
from testing.local import PATIENCE_S, bench_of, cpu_machine, is_alive, wait_until

ANSWERS = """
import json, pathlib, sys
from dsat.values.files import digest
print('{"motd": "Welcome"}\\n{ maintenance tonight }\\nWelcome! ', end="")
for line in sys.stdin:
    asked = json.loads(line)
    op, files = asked["op"], asked.get("files", [])
    seen = {"digests": [digest(pathlib.Path(file)) for file in files], "is_folder": True, "pid": 1}
    answer = {"event": "pong" if op == "ping" else op, **seen}
    print("dsat-answer", json.dumps(answer), flush=True)
"""
FALLS_SILENT = ANSWERS.replace("flush=True)", "flush=True)\n    import time\n    time.sleep(2000)")
TAKES_NOTHING = "import time; time.sleep(2000)"
# What a step of a cluster is: it starts the supervisor, and hands on what both ends say.
RELAY = """
import os, subprocess, sys, threading
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
while chunk := os.read(0, 65536):
    os.write(child.stdin.fileno(), chunk)
"""

# Within it a host that is alive answers on a loaded machine, too.
SILENT_S = 5.0


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(heartbeats, "time", SimpleNamespace(monotonic=lambda: self.now_s))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# -- by the clock


def test_a_host_is_silent_that_says_nothing_between_questions_for_a_minute(clock: Clock) -> None:
    beats = Heartbeats([0, 1])
    silent: list[tuple[int, int]] = []
    asked: list[int] = []
    for second in range(100):
        clock.now_s = 1000.0 + second
        beats.heard(0)
        now_silent, now_asked = beats.due()
        asked += [second] * bool(now_asked)
        silent += [(second, host) for host in now_silent]
        for host in now_silent:
            beats.forget(host)
    assert asked == list(range(0, 100, 10))
    assert silent == [(70, 1)]


def test_time_in_which_nobody_listened_is_nobodys_silence(clock: Clock) -> None:
    beats = Heartbeats([0])
    beats.due()
    clock.now_s += 3600.0  # as after Ctrl-Z and fg
    assert beats.due() == ([], [0])
    listening = ListeningClock(10.0)
    for _ in range(3):
        clock.now_s += 7.0
        listening.now_s()
    clock.now_s += 500.0
    assert listening.now_s() == 31.0


# -- made-up hosts


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
        talk.send(host, {"op": "look", "files": [], "folder": "x"})
    heard: set[int] = set()
    while heard < set(hosts):
        heard |= {host for host, _ in talk._read(10.0)}
    talk._heartbeats.restart()


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
    talk = Supervisors(made_up(ANSWERS, FALLS_SILENT, ANSWERS), tmp_path, env={})
    try:
        settle(talk, 0, 1, 2)
        assert until_lost(talk, 1) == f"it has not answered for {SILENT_S:g} s"
        launch = {"op": "launch", "trial": 7, "port": 1, "ranks": [{}, {}]}
        talk.send(1, launch)
        [(host, ended)] = talk.receive(0.0)
        assert (host, ended["event"], ended["statuses"]) == (1, "ended", [-9, -9])
        for _ in range(20):  # the others answer on
            assert talk.receive(0.1) == []
    finally:
        talk.close()


def test_no_answer_of_thousands_is_waited_for_after_it_came(tmp_path: Path) -> None:
    talk = Supervisors(made_up(ANSWERS), tmp_path, env={})
    try:
        for _ in range(6000):  # python 3.10's queue hung after some 2,000
            assert list(talk._look([], tmp_path)) == [0]
    finally:
        talk.close()


def test_a_supervisor_that_dies_within_a_line_is_lost(tmp_path: Path) -> None:
    torn = 'import sys; sys.stdout.write(\'dsat-answer {"event": "en\')'
    talk = Supervisors(made_up(torn), tmp_path, env={})
    try:
        assert "ended (exit status 0" in until_lost(talk, 0)
    finally:
        talk.close()


@pytest.mark.slow
def test_a_trial_launched_on_a_host_that_was_just_lost_runs_on_another(tmp_path: Path) -> None:
    reads = ANSWERS.replace('op == "ping"', 'op != "look"')
    with bench_of("behaviours", tmp_path, hosts=made_up(reads, reads), cold=True) as bench:
        talk = bench.engine._supervisors
        psutil.Process(talk._clients[0].pid).kill()
        assert list(talk._look([], tmp_path)) == [1]
        trial = bench.trial()
        bench.engine.launch(trial)
        assert bench.engine.poll(2.0) == []
        assert bench.engine._running[trial.id].hosts == {1}


@pytest.mark.usefixtures("quick")
def test_nobody_waits_for_a_host_that_takes_nothing(tmp_path: Path) -> None:
    talk = Supervisors(made_up(ANSWERS, TAKES_NOTHING), tmp_path, env={})
    try:
        settle(talk, 0)
        talk.send(
            1, {"op": "look", "files": ["x" * 2**22], "folder": "x"}
        )  # far more than a pipe holds
        assert "has not answered" in until_lost(talk, 1)
    finally:
        talk.close()


def test_a_host_that_does_not_answer_a_question_is_lost_if_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "_WARM_UP_LIMIT_S", SILENT_S)
    says_ok = ANSWERS.replace('"pid": 1', '"pid": 1, "ok": True, "reason": ""')
    talk = Supervisors(made_up(says_ok, TAKES_NOTHING), tmp_path, env={})
    try:
        settle(talk, 0)
        assert talk.warm_up() == ""
        [(host, answer)] = talk.receive(0.0)
        assert (host, answer["event"]) == (1, LOST)
        assert answer["reason"] == f"importing torch and deepspeed took longer than {SILENT_S:g} s"
    finally:
        talk.close()


def test_each_host_tries_a_fork_on_the_first_of_its_own_devices_that_works(tmp_path: Path) -> None:
    wanted: list[dict[str, str] | None] = [
        {"ONE": "3", "OTHER": "3"},
        {"ONE": "2", "OTHER": "2"},
        None,
    ]
    ok = 'json.loads(line).get("device") == {wanted}, "reason": line'
    codes = [
        ANSWERS.replace('"pid": 1', f'"pid": 1, "ok": {ok.format(wanted=device)}')
        for device in wanted
    ]
    kept = [("3", "1"), ("0", "2"), ("5",)]
    hosts = [
        replace(host, machine=Machine("cuda", "test", devices, ("ONE", "OTHER"), 2**30))
        for host, devices in zip(made_up(*codes), kept, strict=True)
    ]
    talk = Supervisors(hosts, tmp_path, env={})
    try:
        settle(talk, 0, 1, 2)
        assert talk.warm_up(["torch"], broken={1: {0}, 2: {0}}) == ""
        assert '"ONE": "0"' in talk.warm_up(["torch"], broken={2: {0}})
    finally:
        talk.close()


# -- real supervisors


def sleeper(folder: Path, limit_s: float | None = None) -> list[dict[str, Any]]:
    """Requests: for a trial that sleeps, and for a sign of life."""
    return [
        {
            "op": "launch",
            "trial": 0,
            "folder": str(folder),
            "cwd": str(folder),
            "port": 1,
            "command": ["/bin/sleep", "2000"],
            "ranks": [{"env": dict(os.environ), "cores": []}],
            "logs": ["out", "err"],
            "linger_s": None,
        },
        {"op": "ping", "limit_s": limit_s},
    ]


@pytest.mark.usefixtures("quick")
def test_a_host_that_comes_back_ends_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of it is on this machine stays alone, as if it were on another one."""
    monkeypatch.setattr(leftovers, "end_processes", lambda run, host=None: [])
    [lone] = made_up(ANSWERS)
    far = Host(cpu_machine(1), "far", (sys.executable, "-c", RELAY), is_here=False)
    talk = Supervisors([lone, far], tmp_path, env={})
    try:
        settle(talk, 0, 1)
        relay = psutil.Process(talk._clients[1].pid)
        [supervisor] = relay.children()
        for request in sleeper(tmp_path):
            talk.send(1, request)
        [trial] = wait_until(supervisor.children, "the trial")
        supervisor.suspend()
        try:
            assert "has not answered" in until_lost(talk, 1)
            assert [is_alive(each.pid) for each in (relay, supervisor, trial)] == [
                False,
                True,
                True,
            ]
        finally:
            supervisor.resume()
        wait_until(lambda: not is_alive(supervisor.pid), "the supervisor's end")
        assert not is_alive(trial.pid)
    finally:
        talk.close()


@pytest.fixture
def supervisor() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "dsat.engines.local.supervisor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_supervisor_that_is_cut_off_ends_with_its_trials(
    tmp_path: Path, supervisor: subprocess.Popen[str]
) -> None:
    assert supervisor.stdin is not None
    for request in sleeper(tmp_path, limit_s=2.0):
        supervisor.stdin.write(json.dumps(request) + "\n")
    supervisor.stdin.flush()
    me = psutil.Process(supervisor.pid)
    [trial] = wait_until(me.children, "the trial")
    assert supervisor.wait(PATIENCE_S) == 0
    assert not is_alive(trial.pid)


def test_signals_to_the_whole_job_end_no_supervisor_and_ranks_have_their_defaults(
    tmp_path: Path, supervisor: subprocess.Popen[str]
) -> None:
    assert supervisor.stdin is not None and supervisor.stdout is not None
    launch, ping = sleeper(tmp_path)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    ends = [{"trial": n, "command": ["/bin/sh", "-c", f"kill -{n} $$"]} for n in signals]
    told = []
    for request in (ping, *({**launch, **each} for each in ends)):
        supervisor.stdin.write(json.dumps(request) + "\n")
        supervisor.stdin.flush()
        told.append(json.loads(supervisor.stdout.readline().removeprefix("dsat-answer ")))
        for number in signals:
            supervisor.send_signal(number)
    assert [answer.get("statuses") for answer in told] == [None, *([-n] for n in signals)]
