"""Folders of runs: one process at a time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsat.errors import JournalLocked
from dsat.run.folder_lock import FolderLock
from dsat.tuning import run_folders
from dsat.tuning.settings import Settings


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_second_process_is_refused() -> None:
    settings = Settings(method="asha", run_dir=Path("run"))
    with contextlib.ExitStack() as locks:
        run_folders.choose(settings, "name", locks)
        with pytest.raises(JournalLocked, match=rf"run: .*process {os.getpid()} on .*, since 20"):
            run_folders.choose(settings, "name", locks)


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
