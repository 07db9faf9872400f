"""What tests of the meter share."""

from __future__ import annotations

import pytest

from dsat.in_trial import clocks
from testing.metered import Clock, FakeAccelerator, use_accelerator


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    accelerator = FakeAccelerator()
    use_accelerator(monkeypatch, accelerator)
    return accelerator


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, accelerator: FakeAccelerator) -> Clock:
    clock = Clock()
    monkeypatch.setattr(clocks, "time", clock)
    return clock
