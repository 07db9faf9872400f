"""An idle master that is configured for this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.master import StandIn


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with StandIn(tmp_path / "master", nodes=(4,), projects=[("Vision", "nets")], idle=True) as it:
        for name, value in it.client_environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        yield it


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of a configured master that does not answer."""
    monkeypatch.setenv("DET_MASTER", "http://127.0.0.1:9")
    return "http://127.0.0.1:9"
