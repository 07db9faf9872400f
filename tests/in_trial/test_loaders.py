"""Time that steps wait for data loaders, and the loaders' number of samples."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dsat.in_trial.batches import DROPPED
from dsat.in_trial.measurement import SHORT_BATCHES
from dsat.values.outcome import OutcomeKind
from testing.scripts import Scripts

pytestmark = pytest.mark.slow

LOADS = """
import itertools, time
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler


def loader_of(samples, size, **options):
    return DataLoader(torch.randn(samples, 16), size, **options)


def read(loader, batches):
    for _ in range(batches):
        list(itertools.islice(loader, 1))


def train_with(loader, make=make_engine, part=None):
    engine = make()
    while True:
        for batch in loader:
            engine.backward(engine(batch[:part]).square().mean())
            engine.step()


"""
SLOW = """
class Slow(IterableDataset):
    def __iter__(self):
        while True:
            time.sleep(0.05)
            yield torch.randn(4, 16)


train_with(DataLoader(Slow(), None))
"""


def test_waiting_for_data_is_a_part_of_the_step(scripts: Scripts) -> None:
    outcome = scripts.run(LOADS + SLOW, micro_batch=4).well().outcome
    assert outcome.metrics is not None
    assert 49 <= outcome.metrics.data <= outcome.metrics.latency
    assert outcome.most_samples is None, "their number is not known"


BY_HAND = """
read(loader_of(30, 4), 1)
train(make_engine())
"""
EVALUATES = """
read(loader_of(9, 4), 6)  # before the engine is made
engine = make_engine()
read(loader_of(9, 4), 1)
train_with(loader_of(30, 4, drop_last=True), lambda: engine)
"""
SAMPLER = """
class Endless(BatchSampler):
    def __len__(self):
        raise ValueError("an infinite sampler has no length")


sampler = Endless(SequentialSampler(range(30)), 4, drop_last=False)
train_with(DataLoader(torch.randn(30, 16), batch_sampler=sampler))
"""
OWN_WAY = """
class Own(DataLoader):
    def _get_iterator(self):
        return iter([torch.randn(4, 16)] * 2)


train_with(Own(range(30), 4))
"""
SHARES = """
from accelerate.data_loader import prepare_data_loader

shares = dict(num_processes=2, process_index=0, put_on_device=False)
train_with(prepare_data_loader(loader_of(30, 4), **shares))
"""


@pytest.mark.parametrize(
    ("script", "gas", "samples"),
    [
        ("train_with(loader_of(30, 4, drop_last=True))", 2, [15]),  # for one micro step of two
        (EVALUATES, 1, [30]),
        (BY_HAND, 1, [None]),  # most batches are made like this
        # TRL's GRPO loads such batches, to generate for several micro steps at once.
        ("train_with(loader_of(60, 12), part=4)", 1, [20]),
        (SAMPLER, 1, [None]),  # torch does not call its `__len__`, which may raise any error
        (OWN_WAY, 1, [None]),
        (SHARES, 1, range(15, 21)),  # of an epoch, accelerate gives each rank its part
    ],
)
def test_the_samples_are_those_of_the_loader_that_feeds_the_steps(
    scripts: Scripts, script: str, gas: int, samples: Sequence[int | None]
) -> None:
    outcome = scripts.run(LOADS + script, micro_batch=4, gas=gas).well().outcome
    assert outcome.most_samples in samples


def test_data_for_fewer_micro_batches_than_a_step_has_are_told(scripts: Scripts) -> None:
    script = LOADS + "train_with(loader_of(30, 8, drop_last=False))"
    outcome = scripts.run(script, micro_batch=8, gas=4).outcome
    assert outcome.kind is OutcomeKind.INVALID and outcome.smaller_may_run, outcome
    assert outcome.most_samples == 7


DROPS = """
def collate(rows):
    return torch.stack([row for row in rows if row is not None])

samples = [None if i % 20 == 17 else torch.randn(16) for i in range({samples})]
train_with(DataLoader(samples, 4, collate_fn=collate))
"""


@pytest.mark.parametrize(
    ("samples", "warning"),
    [(20_000, DROPPED), (20, SHORT_BATCHES)],  # the same batches, as an epoch of five
)
def test_only_the_length_of_the_data_tells_the_end_of_an_epoch(
    scripts: Scripts, samples: int, warning: str
) -> None:
    """Every fifth batch has three samples instead of four."""
    ended = scripts.run(LOADS + DROPS.format(samples=samples), micro_batch=4, gas=2).well()
    assert ended.warnings == (warning,)


def test_only_the_part_of_the_data_that_micro_steps_use_counts(scripts: Scripts) -> None:
    script = """
engine = make_engine()
for batch in loader_of(36, 12):
    engine.backward(engine(batch[:4]).square().mean())
    engine.step()
"""
    outcome = scripts.run(LOADS + script, micro_batch=4).outcome
    assert "ended after 3 optimizer steps" in outcome.message
    assert outcome.most_samples == 2, "for 5 steps"
