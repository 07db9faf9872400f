"""A user in a fresh folder, for all scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsat.app import installed_deepspeed
from testing.scenarios import User


@pytest.fixture
def user(tmp_path: Path) -> User:
    """Return a user whose script trains with a micro batch of 1 on a device that holds 30."""
    user = User(tmp_path)
    user.has()
    return user


@pytest.fixture
def unchecked_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask DeepSpeed about no configuration, which takes seconds for each new one."""
    monkeypatch.setattr(installed_deepspeed, "_stamp", lambda: None)
