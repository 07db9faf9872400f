"""Frameworks' own commands and files, tuned, with the real packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.own_commands import FRAMEWORKS, tuned


@pytest.mark.nightly
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_is_tuned_by_its_own_command(name: str, tmp_path: Path) -> None:
    assert tuned(name, tmp_path / "work") == "tuned"
