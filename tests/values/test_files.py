"""Folders that users may not have, and paths that are too long."""

from __future__ import annotations

import pwd
import socket
import tempfile
from pathlib import Path

import pytest

from dsat.values.files import cache_folder, folder_for_sockets, home


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


@pytest.mark.parametrize("length", [20, 91, 92, 200])
def test_sockets_fit_below_any_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        usual = Path(f"{short}/").joinpath("x" * (length - len(short) - 1))
        usual.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(usual))
        above = folder_for_sockets()
        assert (above == str(usual)) is (length <= 91)
        with (
            tempfile.TemporaryDirectory(prefix="dsat-", dir=above) as folder,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            listener.bind(f"{folder}/s")
