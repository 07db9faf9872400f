"""Waiting for data loaders, and what they have in advance."""

from __future__ import annotations

import inspect
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dsat.in_trial import loaders
from dsat.in_trial.meter import Meter
from testing.metered import SPEC, Clock, FakeEngine


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__")):
        monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))
    monkeypatch.setattr(loaders, "_in_store", 0)
    for name in ("_begun", "_read"):
        monkeypatch.setattr(loaders, name, Counter())
    loaders.watch.__wrapped__()


class Slow(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        for number in range(3):
            time.sleep(0.1)
            yield number


@pytest.mark.parametrize("workers", [0, 1])
def test_waiting_is_counted(workers: int) -> None:
    before = loaders.waited_s()
    assert len(list(DataLoader(Slow(), None, num_workers=workers))) == 3
    assert loaders.waited_s() - before >= 0.15  # and this process may be late itself
    assert loaders.batches_in_store() == 2 * workers
    assert loaders.samples(4, 0) == (None, 0), "their number is not known"


def read(loader: DataLoader[int], batches: int) -> None:
    for _ in range(batches):
        list(itertools.islice(loader, 1))


def loader_of(samples: int, size: int, **options: Any) -> DataLoader[int]:
    return DataLoader(range(samples), size, **options)  # type: ignore[arg-type]


def test_the_samples_are_those_of_the_loader_that_feeds_the_steps() -> None:
    evaluation = loader_of(9, 4)
    read(evaluation, 6)
    meter = Meter(SPEC, lambda outcome: None)
    meter.watch(FakeEngine(Clock()))
    read(evaluation, 1)
    meter.watch(FakeEngine(Clock()))  # another, in the middle
    read(loader_of(30, 4, drop_last=True), 5)
    assert loaders.samples(4, 6) == (30, 5 * 30)
    assert loaders.samples(4, 11) == (None, 0), "most of the batches are made by hand"
    assert loaders.samples(5, 0) == (None, 0)
    assert loaders.samples(4, 0) == (30, 7 * 9 + 5 * 30)


def test_a_loader_may_give_each_step_the_samples_of_several() -> None:
    """As TRL's GRPO has it generate for several micro steps at once."""
    read(loader_of(60, 12), 5)
    assert loaders.samples(4, 5) == (20, 5 * 60)
    assert loaders.samples(5, 5) == (None, 0)
    assert loaders.samples(4, 11) == (None, 0)


def test_a_sampler_of_a_scripts_own_bounds_nothing() -> None:
    """It may answer with any error: torch does not ask it."""

    class Endless(BatchSampler):
        def __len__(self) -> int:
            raise ValueError("an infinite sampler has no length")

    sampler = Endless(SequentialSampler(range(30)), 4, drop_last=False)
    read(DataLoader(range(30), batch_sampler=sampler), 5)  # type: ignore[arg-type]
    assert loaders.samples(4, 0) == (None, 0)


def test_a_loader_may_be_iterated_in_a_way_of_its_own() -> None:
    class Own(DataLoader[int]):
        def _get_iterator(self) -> Any:
            return iter([1, 2])

    assert list(Own(range(30), 4)) == [1, 2]  # type: ignore[arg-type]


def test_accelerate_shares_an_epoch_out() -> None:
    from accelerate.data_loader import prepare_data_loader

    shard = prepare_data_loader(
        loader_of(30, 4), num_processes=2, process_index=0, put_on_device=False
    )
    of_epoch, _ = loaders.samples(4, sum(1 for _ in shard))
    assert of_epoch is not None and 15 <= of_epoch <= 20
