"""Processes and files that a killed run leaves, and which of them a later engine removes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dsat.engines.agent import leftovers
from dsat.engines.agent.leftovers import CompilerLocks
from testing.local import (
    PATIENCE_S,
    bench_of,
    buffers_of,
    engine_of,
    is_alive,
    processes_of,
    read_json,
    wait_until,
)


@contextlib.contextmanager
def sleeping(**variables: str) -> Iterator[psutil.Process]:
    """Run a process that can be found only by its variables."""
    process = subprocess.Popen(["sleep", "2000"], env={**os.environ, **variables})
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def test_an_engine_ends_what_is_left_of_its_run_and_of_no_other(tmp_path: Path) -> None:
    run, other = tmp_path / "run-1", tmp_path / "run-10"
    run.mkdir()
    with (
        sleeping(DSAT_RUN_DIR=str(run)) as of_run,
        sleeping(DSAT_RUN_DIR=str(other)) as of_another_run,
    ):
        engine_of("behaviours", run, cold=True).close()
        wait_until(lambda: not is_alive(of_run.pid), "its end")
        assert is_alive(of_another_run.pid)


OWNS = """
import pathlib, subprocess, sys
from dsat.engines.own_command import OwnCommand
from dsat.values.trial import TrialOptions
words = ["bash", "-c", "setsid sleep 2000 & echo $! > left; wait"]
run = OwnCommand(words, pathlib.Path(sys.argv[1]), TrialOptions(timeout_s=600), measures=False)
run.ranks()
"""


def test_a_later_start_ends_what_a_killed_first_command_left(tmp_path: Path) -> None:
    owner = psutil.Popen([sys.executable, "-c", OWNS, str(tmp_path)])
    left = wait_until(
        lambda: (tmp_path / "left").exists() and (tmp_path / "left").read_text(), "it"
    )
    [supervisor] = owner.children()
    assert int(left) not in leftovers.end_orphans(), "its dsat lives"
    owner.suspend()  # neither notices the other's end
    for process in (supervisor, owner):
        process.kill()
    owner.wait(PATIENCE_S)
    assert is_alive(int(left)), "or there is nothing to show"
    mark = f"{leftovers._place_of(os.getpid())}-elsewhere {owner.pid} 0"
    with sleeping(DSAT_OWNER=mark) as of_another_machine:
        leftovers.end_orphans()  # or from another test's search, which has just started
        wait_until(lambda: not is_alive(int(left)), "its end")
        assert is_alive(of_another_machine.pid)


@pytest.mark.slow
def test_what_a_kill_of_everything_leaves_is_ended_by_the_next_run(tmp_path: Path) -> None:
    """Workers, daemons and segments of shared memory remain.

    The processes were forked, so no variable of theirs names the trial.
    """
    code = (
        "import pathlib, sys, time\n"
        "from testing.local import bench_of\n"
        "with bench_of('behaviours', pathlib.Path(sys.argv[1]), slots=2) as bench:\n"
        "    for left in ('worker', 'daemon'):\n"
        "        bench.engine.launch(bench.trial(f'leaves and hangs: {left}'))\n"
        "    time.sleep(1000)\n"
    )
    owner = psutil.Popen([sys.executable, "-c", code, str(tmp_path)])
    wait_until(lambda: len(list(tmp_path.glob("trials/*/left0.json"))) == 2, "both trials")
    left = [pid for path in tmp_path.glob("trials/*/left0.json") for pid in read_json(path)]
    [supervisor] = owner.children()
    for process in (supervisor, owner):
        process.kill()
    owner.wait(PATIENCE_S)
    assert len(left) == 2 and all(map(is_alive, left)), "or there is nothing to show"
    assert len(buffers_of(tmp_path)) == 2
    assert set(left) <= set(leftovers.end_processes(tmp_path))
    wait_until(lambda: not any(map(is_alive, left)), "the end of all")
    assert processes_of(tmp_path) == [] and buffers_of(tmp_path) == []


# -- locks of compilers


@pytest.mark.slow
def test_a_compilers_lock_of_an_interrupted_trial_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    with bench_of("behaviours", tmp_path, imported=True) as bench:
        bench.engine.launch(bench.trial("hangs"))
        lock.touch()
    assert not lock.exists()


@pytest.mark.parametrize("waits", [True, False])
def test_only_locks_that_were_made_since_are_removed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    waits: bool,
) -> None:
    monkeypatch.setattr(leftovers, "_torch_waits_for_files", lambda: waits)
    env = {"XDG_CACHE_HOME": str(tmp_path)}  # as torch does
    names = ("old", "young", "held", "own")
    old, young, held, own = (tmp_path / "torch_extensions" / name / "lock" for name in names)
    for path in (old, young, held, own):
        path.parent.mkdir(parents=True)
    old.touch()
    young.touch()
    os.utime(old, (time.time() - 3600,) * 2)
    locks = CompilerLocks(env)
    assert [str(old) in message for message in caplog.messages] == [True] * waits
    own.touch()
    with open(held, "x"):
        locks.remove()
        assert old.exists() and young.exists(), "of a user or container that is not seen"
        assert held.exists() and not own.exists()


def test_shared_memory_of_other_ports_stays(tmp_path: Path) -> None:
    port, mark = 64_999, f"test{os.getpid()}"
    names = [f"deepspeed_allreduce_buffer_{os.getuid()}_{mark}_{p}_0" for p in (port, f"{port}1")]
    own, other = (Path("/dev/shm") / name for name in names)
    (tmp_path / "ports").write_text(f"{port}\n")
    try:
        own.touch()
        other.touch()
        leftovers.unlink_shared_memory(tmp_path / "ports")
        assert other.exists() and not own.exists()
    finally:
        for path in (own, other):
            path.unlink(missing_ok=True)


def test_a_swap_folder_of_a_run_whose_path_is_not_utf8() -> None:
    run, offload = Path(os.fsdecode(b"/data/caf\xe9")), {"device": "nvme", "nvme_path": "/nvme"}
    config = {"zero_optimization": {"offload_param": offload}}
    found = leftovers.choose_swap_folders(config, run, "t")
    path = found["zero_optimization"]["offload_param"]["nvme_path"]
    assert path.startswith("/nvme/dsat-") and path.endswith("-t")
