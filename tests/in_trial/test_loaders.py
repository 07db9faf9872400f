"""What data loaders tell of an epoch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dsat.in_trial import loaders

DATA: Any = TensorDataset(torch.zeros(103, 2))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(1000))


class Pairs:
    """Batches of a kind of its own, as accelerate's are."""

    batch_size, drop_last = 8, True

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(8))] * len(self))

    def __len__(self) -> int:
        return 6


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", _BaseDataLoaderIter.__next__)
    monkeypatch.setattr(loaders, "_samples", {})
    monkeypatch.setattr(loaders, "_in_store", 0)
    loaders.watch()


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"batch_size": 8}, 103),
        ({"batch_size": 8, "drop_last": True, "shuffle": True}, 103),
        ({"batch_size": 8, "sampler": DistributedSampler(DATA, num_replicas=2, rank=0)}, 52),
        ({"batch_size": 8, "sampler": WeightedRandomSampler([1.0] * 103, 40)}, 40),
        ({"batch_sampler": BatchSampler(SequentialSampler(DATA), 8, drop_last=False)}, 103),
        ({"batch_sampler": Pairs()}, 6 * 8 + 7),
        ({"batch_size": None}, 0),
    ],
)
def test_an_epoch_has_so_many_samples(options: dict[str, Any], samples: int) -> None:
    next(iter(DataLoader(DATA, **options)))
    assert loaders.samples_of_epoch(8) == samples
    assert loaders.samples_of_epoch(4) == 0


def test_a_stream_tells_nothing() -> None:
    next(iter(DataLoader(Stream(), batch_size=8)))
    assert loaders.samples_of_epoch(8) == 0


def test_of_several_loaders_the_longest_counts() -> None:
    for count in (30, 100, 20):
        next(iter(DataLoader(TensorDataset(torch.zeros(count)), batch_size=8)))
    assert loaders.samples_of_epoch(8) == 100


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
