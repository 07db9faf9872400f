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


def test_the_samples_of_an_epoch_are_known_where_all_data_have_a_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loaders, "_samples", {})
    for data, size in ((range(30), 4), (range(10), 4), (range(99), 5)):
        iter(DataLoader(data, size, drop_last=size == 4))  # type: ignore[arg-type]
    assert [loaders.samples_in_epoch(size) for size in (4, 5, 6)] == [30, 99, None]
    assert [loaders.samples_given(size) for size in (4, 5, 6)] == [40, 99, None]
    iter(DataLoader(Slow(), None))
    assert loaders.samples_in_epoch(4) is None


def test_accelerate_shares_an_epoch_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.data_loader import prepare_data_loader

    monkeypatch.setattr(loaders, "_samples", {})
    loader: DataLoader[int] = DataLoader(range(30), 4)  # type: ignore[arg-type]
    shard = prepare_data_loader(loader, num_processes=2, process_index=0, put_on_device=False)
    iter(shard.base_dataloader if hasattr(shard, "base_dataloader") else shard).__next__()
    found = loaders.samples_in_epoch(4)
    assert found is not None and 15 <= found <= 20
