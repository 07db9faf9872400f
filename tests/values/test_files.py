"""Files that cannot be written, folders that users may not use, and paths that are too long."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path

import pytest

from dsat.values.files import cache_folder, home, write_atomically, written_atomically


def test_a_file_is_replaced_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / ("名" * 83 + ".html")  # the longest name
    for text in ("first, and longer", "zweitens: ä"):
        write_atomically(path, text)
        assert path.read_text(encoding="utf-8") == text
        assert [*tmp_path.iterdir()] == [path]


def test_an_error_while_a_file_is_written_keeps_the_old_one_and_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (folder := tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError, match=f"directory: '{folder}'$"):
        write_atomically(folder, "text")
    with pytest.raises(OSError, match=r"^without a number$"), written_atomically(tmp_path / "b"):
        raise OSError("without a number")
    path = tmp_path / "best [1].json"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left") as failed:
        write_atomically(path, "new")
    assert failed.value.filename == str(path)
    assert path.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["a", path.name]


def test_a_reader_sees_the_old_text_until_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    seen: list[tuple[str, str]] = []

    def replace(source: Path, destination: Path) -> None:
        seen.append((path.read_text(), Path(source).read_text()))
        os.rename(source, destination)

    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    monkeypatch.setattr(os, "replace", replace)
    write_atomically(path, "new")
    assert seen == [("old", "new")]
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino]
    assert path.read_text() == "new"


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
