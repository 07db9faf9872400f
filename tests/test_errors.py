"""Errors of the operating system, as dsat reports them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsat.errors import DsatError


def test_a_folder_that_cannot_be_copied_names_a_file_and_the_reason(tmp_path: Path) -> None:
    """`shutil` collects the errors of all files, as on a full disk, in a list."""
    (tmp_path / "logs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "logs" / name).symlink_to("missing")
    with pytest.raises(shutil.Error) as failed:
        shutil.copytree(tmp_path / "logs", tmp_path / "copy")
    message = str(DsatError.convert_os_error(failed.value))
    assert message.startswith("[Errno 2] No such file or directory: ")
    assert message.count("No such file") == 1 and "(" not in message
