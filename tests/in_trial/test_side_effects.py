"""What a training may change of the files around it."""

from __future__ import annotations

import inspect
import os
import pickle
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from dsat.in_trial.side_effects import _Files

CHANGES = {os: "remove unlink rmdir rename replace symlink", shutil: "rmtree"}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's output, below the temporary folder, when a training has begun beside it."""
    for module, names in CHANGES.items():
        for name in names.split():
            monkeypatch.setattr(module, name, getattr(module, name))  # as it is again afterwards
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, trial = tmp_path / "out", tmp_path / "trial"
    (folder / "checkpoint-1" / "shards").mkdir(parents=True)
    trial.mkdir()
    for name in ("best.pt", "checkpoint-1/shards/0.pt"):
        (folder / name).write_text("old")
    time.sleep(0.05)  # some ticks of the file system's clock
    files = _Files(trial, lambda name: None)
    files.adapt_changes()
    assert os.unlink in os.supports_dir_fd, "libraries ask for it (filelock)"
    files.keep()
    files.begun.set()
    return folder


def test_what_is_older_stays_whatever_is_made_beside_it(work: Path) -> None:
    (work / "checkpoint-2").mkdir()
    (work / "checkpoint-1" / "new.pt").write_text("new")
    shutil.rmtree(work / "checkpoint-1")
    shutil.rmtree(work)
    os.remove(os.fsencode(work / "best.pt"))
    (work / "best.pt").unlink()
    os.rename(work / "checkpoint-1", work / "before")
    (work / "part").write_text("new")
    os.replace(work / "part", work / "best.pt")
    assert (work / "best.pt").read_text() == "old"
    assert (work / "checkpoint-1" / "shards" / "0.pt").read_text() == "old"
    assert not (work / "part").exists(), "nothing is left of what was to take an older place"


def test_its_own_files_are_the_trainings(work: Path) -> None:
    (work / "mine" / "inner").mkdir(parents=True)
    (work / "mine" / "inner" / "a").write_text("new")
    os.replace(work / "mine" / "inner" / "a", work / "b")
    os.symlink("b", work / "link")
    os.remove(work / "link")
    shutil.rmtree(work / "mine")
    os.remove(work / "b")
    assert sorted(path.name for path in work.iterdir()) == ["best.pt", "checkpoint-1"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cache.pt").write_text("new")
    assert not Path(folder).exists()
    # A pool of processes passes functions so.
    assert pickle.loads(pickle.dumps(os.remove)) is os.remove
    assert pickle.loads(pickle.dumps(shutil.rmtree)) is shutil.rmtree


def test_a_function_that_a_class_has_is_no_method_of_it(work: Path) -> None:
    """As builtin functions are none."""

    class Store:
        unlink: Any = os.unlink

    (work / "mine").touch()
    Store().unlink(work / "mine")
    assert not (work / "mine").exists()
    assert list(inspect.signature(os.unlink).parameters) == ["path", "dir_fd"]
