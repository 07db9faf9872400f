"""Fixtures that several tests of the meter use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from dsat.in_trial import clocks
from testing.metered import Clock, FakeAccelerator, use_accelerator
from testing.scripts import Scripts, scripts_in


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


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes this process rank 0 of `count` ranks with equal values."""

    def join(count: int) -> None:
        def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, **_: Any) -> None:
            if op == dist.ReduceOp.SUM:
                tensor.mul_(count)

        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: count)
        monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
        monkeypatch.setattr(dist, "all_reduce", all_reduce)

    return join


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    """Yield a folder for training scripts of one rank; each takes about a second."""
    with scripts_in(tmp_path_factory.mktemp("scripts")) as found:
        yield found
