"""What a run that was killed leaves, and which of it a later engine ends or removes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dsat.engines.local import leftovers
from dsat.engines.local.leftovers import CompilerLocks
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
    """A process that nobody ends but by its variables."""
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
        sleeping(DSAT_TRIAL_DIR=f"{run}/trials/t") as of_trial,
        sleeping(DSAT_RUN_DIR=str(run)) as of_run,
        sleeping(DSAT_TRIAL_DIR=f"{other}/trials/t") as of_another,
        sleeping(DSAT_RUN_DIR=str(other)) as of_another_run,
    ):
        engine_of("behaviours", run, cold=True).close()
        wait_until(lambda: not (is_alive(of_trial.pid) or is_alive(of_run.pid)), "their end")
        assert is_alive(of_another.pid) and is_alive(of_another_run.pid)


@pytest.mark.slow
def test_what_a_kill_of_everything_leaves_is_ended_by_the_next_run(tmp_path: Path) -> None:
    """Workers and daemons, forked so that no variable of theirs tells of the trial, and segments of
    shared memory."""
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


def test_a_lock_is_removed_only_if_nobody_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, held = tmp_path / "fused_adam" / "lock", tmp_path / "cpu_adam" / "lock"
    for path in (stale, held):
        path.parent.mkdir()
    stale.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with open(held, "x"):
        engine_of("behaviours", tmp_path, cold=True).close()
        assert held.exists() and not stale.exists()


@pytest.mark.xfail(strict=True, reason="locks of other users, whose files are closed to us, go too")
def test_a_lock_whose_holder_cannot_be_seen_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = tmp_path / "cpu_adam" / "lock"
    held.parent.mkdir()
    real = os.path.realpath

    def closed(path: str) -> str:
        """As another user's: the links in /proc are not to be read."""
        if str(path).startswith("/proc/"):
            raise PermissionError
        return real(path)

    with open(held, "x"):
        monkeypatch.setattr(os.path, "realpath", closed)
        CompilerLocks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}).remove()
        assert held.exists()


def test_a_young_lock_is_left_where_another_host_may_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}  # as torch does
    young, old = (tmp_path / "torch_extensions" / name / "lock" for name in ("new", "old"))
    for path in (young, old):
        path.parent.mkdir(parents=True)
        path.touch()
    for path, age_s in ((young, 1), (old, 3600)):
        os.utime(path, (time.time() - age_s,) * 2)
    mounted = [("/", "ext4"), (str(tmp_path), "nfs4")]
    parts = [SimpleNamespace(mountpoint=at, fstype=kind) for at, kind in mounted]
    monkeypatch.setattr("psutil.disk_partitions", lambda *, all: parts)
    locks = CompilerLocks(env)
    locks.remove()
    assert young.exists() and not old.exists()
    locks.remove(own=True)
    assert young.exists(), "it was there before"
    young.touch()
    locks.remove()
    assert young.exists()
    locks.remove(own=True)
    assert not young.exists()
    young.touch()
    del parts[1]
    locks.remove()
    assert not young.exists()


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
