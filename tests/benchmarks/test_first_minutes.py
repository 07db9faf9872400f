"""The benchmark of a GPU in a few minutes: time budgets, clean-up and resuming."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import first_minutes
from benchmarks.gpu.first_minutes import CUT, DONE, STEPS


@pytest.mark.slow
def test_a_process_ends_with_all_that_it_started() -> None:
    words = ["bash", "-c", "(sleep 1000 & sleep 1000) & echo ready; wait"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = psutil.Process(process.pid).children(recursive=True)
        first_minutes.end(process)
    psutil.wait_procs(started, timeout=10)
    assert started and process.returncode is not None
    assert not any(_lives(each) for each in started)


@pytest.mark.slow
def test_processes_of_a_step_that_ended_by_itself_end() -> None:
    words = ["bash", "-c", "sleep 1000 >/dev/null & echo $!"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        left = psutil.Process(int(process.stdout.readline()))
        process.wait()
        first_minutes.end(process)
    psutil.wait_procs([left], timeout=10)
    assert not _lives(left)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_step_is_cut_after_its_budget(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert not first_minutes.take("failures", tmp_path, 0.01, os.environ, short=True)
    assert first_minutes.findings(tmp_path, "failures")[CUT]
    assert CUT in capfd.readouterr().out


def test_what_has_not_begun_is_taken_before_what_was_cut(tmp_path: Path) -> None:
    first, second, third, *others = STEPS
    for name, found in ((first, {CUT: ""}), (second, {DONE: 1.0}), (third, {"failed": ""})):
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert first_minutes.unfinished(tmp_path) == [*others, first, third]


def test_findings_and_journals_are_kept_and_nothing_large(tmp_path: Path) -> None:
    kept = ("machine.json", "gpt2_medium/run/journal.jsonl", "gpt2_medium/work/model.py")
    for name in (*kept, "extensions/adam/build.log", "gpt2_medium/work/model.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "large.log").write_bytes(bytes(2**20 + 1))
    first_minutes.keep(tmp_path)
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert sorted(archive.getnames()) == sorted(kept)
