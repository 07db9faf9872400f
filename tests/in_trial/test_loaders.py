"""Waiting for data loaders, and what they have in advance."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from torch.utils.data import (
    DataLoader,
    IterableDataset,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dsat.in_trial import loaders


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", _BaseDataLoaderIter.__next__)
    monkeypatch.setattr(loaders, "_in_store", 0)
    loaders.watch()


class Slow(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        for number in range(3):
            time.sleep(0.02)
            yield number


@pytest.mark.parametrize("workers", [0, 1])
def test_waiting_is_counted(workers: int) -> None:
    before = loaders.waited_s()
    assert len(list(DataLoader(Slow(), None, num_workers=workers))) == 3
    assert loaders.waited_s() - before >= 0.06
