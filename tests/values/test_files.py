"""Files that cannot be written, folders that users may not have, and paths that are too long."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path

import pytest

from dsat.values.files import cache_folder, home, write_atomically
from testing.scenarios import User


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "best [1].json"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left") as failed:
        write_atomically(path, "new")
    assert failed.value.filename == str(path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == [path.name]


def test_what_a_run_leaves_is_for_its_owner_alone(tmp_path: Path) -> None:
    user = User(tmp_path)
    user.has()
    assert user.tunes("--max-trials", 3, method="random").status == 0
    left = [path for path in (tmp_path / "run").iterdir() if path.name != "trials"]
    assert {"journal.jsonl", "best_ds_config.json"} <= {path.name for path in left}
    assert [path.name for path in left if path.stat().st_mode & 0o077] == []


def test_a_user_without_a_home_has_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> pwd.struct_passwd:
        raise KeyError(user)

    monkeypatch.setenv("HOME", "/home/eve/")
    assert home() == Path("/home/eve")
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert home() == Path("/")
    assert cache_folder("page") == Path("/.cache/dsat/page")
