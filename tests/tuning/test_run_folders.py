"""Folders of runs: one process at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsat.run.folder_lock import FolderLock


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_killed_process_holds_no_lock() -> None:
    code = (
        "import os, pathlib, sys\nfrom dsat.run.folder_lock import FolderLock\n"
        "lock = FolderLock(pathlib.Path('run'))\nos.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    told = json.loads(Path("run/.dsat").read_text())
    assert told["pid"] != os.getpid()
    FolderLock(Path("run")).close()


def test_a_lock_that_leads_elsewhere_is_not_followed() -> None:
    Path("run").mkdir()
    Path("precious").write_text("precious")
    Path("run/.dsat").symlink_to("../precious")
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock(Path("run"))
    assert Path("precious").read_text() == "precious"
