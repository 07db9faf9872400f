"""Counts of what a script feeds its model: samples and tokens, in any form."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsat.in_trial.batch_flag import find_batch_flag
from dsat.in_trial.batches import UNCOUNTED, LeafFinder, is_about
from dsat.in_trial.measurement import SHORT_BATCHES
from dsat.values.outcome import Outcome, OutcomeKind, SequenceLengths
from testing.metered import Clock, FakeEngine, attach, measured_by
from testing.scripts import scripts_in

TRIAL, OWN = 5, 8
IDS = torch.ones(4, 9, dtype=torch.long)
MASK = torch.ones(4, 9, dtype=torch.long).tril()  # 1 + 2 + 3 + 4 tokens
IMAGES = torch.zeros(4, 3, 8, 8)
LABELS = torch.ones(4, 40, dtype=torch.long)
PAIR = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
Shape = tuple[int, ...]


class Engine(FakeEngine):
    """An engine whose model accepts any input."""

    def forward(self, *inputs: Any) -> torch.Tensor:
        return super().forward(torch.zeros(()))


def told_of(clock: Clock, *batches: Sequence[Any], **settings: Any) -> Outcome:
    """Return the outcome of a script that feeds these batches in turn."""
    engine = Engine(clock, settings.setdefault("micro_batch", TRIAL))
    attach(engine, **settings)

    def loop() -> None:
        for step in range(100):
            engine.backward(engine.forward(*batches[step % len(batches)]))
            engine.step()

    return measured_by(loop)


def of_shapes(*shapes: Shape) -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in shapes]


def verdict(clock: Clock, shapes: list[Shape], micro_batch: int, own: int | None) -> str:
    told = told_of(clock, of_shapes(*shapes), micro_batch=micro_batch, own_micro_batch=own)
    if told.kind is OutcomeKind.INVALID:
        return "short" if told.smaller_may_run else "invalid"
    assert told.ok and told.metrics is not None
    assert told.metrics.throughput == pytest.approx(micro_batch / 0.010)
    return "warns" if UNCOUNTED in told.warnings else "fine"


def test_images_of_a_text_are_no_samples(clock: Clock) -> None:
    batches = [
        [{"pixel_values": torch.zeros(images, 3, 8, 8), "input_ids": IDS[:1]}]
        for images in (1, 3, 5)
    ]
    told = told_of(clock, *batches, micro_batch=1)
    assert told.metrics is not None and told.warnings == ()
    assert told.metrics.throughput == pytest.approx(1 / 0.010)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(8, 3, 32, 32), ()], "invalid"),
        ([(8, 8)], "invalid"),
        ([(8, 128), (1, 128)], "invalid"),  # positions, the same for all samples
        ([(5, 8)], "fine"),  # a sequence as long as the own micro batch
        ([(8, 5)], "fine"),  # the same, time first
        ([(8, 8), (5, 8)], "fine"),  # with a mask over it
        ([(640, 16)], "warns"),  # all samples in one row
        ([(1, 640)], "warns"),
        ([(10, 8)], "warns"),  # pairs of sequences as long as the own micro batch
        ([(8, 128), (640,)], "warns"),
        ([(128, 8)], "warns"),  # time first, which short sequences look like
        ([()], "warns"),  # nothing to count
        ([(3, 128), (3,), (1, 128)], "short"),
        ([(2, 90), (4, 16)], "warns"),  # edges and nodes of a graph
    ],
)
def test_shapes(clock: Clock, shapes: list[Shape], expected: str) -> None:
    assert verdict(clock, shapes, TRIAL, OWN) == expected


@pytest.mark.parametrize(
    ("rows", "micro_batch", "own", "expected"),
    [
        (8, 4, 8, "warns"),  # pairs of the trial's four, perhaps
        (8, 2, 8, "invalid"),
        (1, 4, 1, "short"),  # its own batch is the largest that there is
        (16, 8, 8, "warns"),
        (8, 5, None, "warns"),
    ],
)
def test_sizes(clock: Clock, rows: int, micro_batch: int, own: int | None, expected: str) -> None:
    assert verdict(clock, [(rows, 128)], micro_batch, own) == expected


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    names: list[str]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda ids: ids,
        lambda ids: {"ids": ids, "text": "words"},
        lambda ids: UserDict(ids=ids),  # as transformers' BatchEncoding is
        lambda ids: (None, [ids, 3]),
        lambda ids: Batch(ids, ["a", "b"]),
        lambda ids: SimpleNamespace(ids=ids),
        lambda ids: {"inputs": {"deep": [ids]}},
        lambda ids: ids.transpose(0, 1),
        lambda ids: (torch.zeros(1, 77), ids),  # positions, the same for all samples
        lambda ids: torch.nested.nested_tensor(list(ids)),
    ],
)
def test_rows_are_counted_in_any_form(clock: Clock, wrap: Callable[[torch.Tensor], Any]) -> None:
    full, longer, short = (wrap(torch.zeros(*size)) for size in ((5, 9), (5, 7), (2, 99)))
    told = told_of(clock, [full], [longer], [full], [longer], [short])
    assert told.ok and told.warnings == (SHORT_BATCHES,), told


def profiled(clock: Clock, micro_batch: int, *shapes: Shape, own: int | None = None) -> Any:
    """Return the profile of a script that feeds batches of these shapes."""
    told = told_of(
        clock, of_shapes(*shapes), micro_batch=micro_batch, own_micro_batch=own, profile=True
    )
    assert told.profile is not None, told
    return told.profile


def test_features_as_many_as_the_micro_batch_are_no_samples(clock: Clock) -> None:
    """There are 96 samples of 256 features, and the micro batch is 256."""
    known = profiled(clock, 4, (4, 256)).batch_dimensions
    settings = {"micro_batch": 256, "own_micro_batch": 4, "batch_dimensions": known}
    told = told_of(clock, of_shapes((96, 256)), **settings)
    assert told.kind is OutcomeKind.INVALID and "has 96 samples" in told.message
    assert told.most_samples == 96
    told = told_of(clock, *[of_shapes((256, 256))] * 4, of_shapes((96, 256)), **settings)
    assert told.warnings == (SHORT_BATCHES,)
    square = profiled(clock, 4, (4, 4), (4,), (9, 4))
    assert square.batch_dimensions == {"1": 0, "2": 1}, "4 by 4 tells nothing"


def test_time_steps_as_many_as_the_micro_batch_are_no_samples(clock: Clock) -> None:
    """The first dimension is time, and one mask serves all samples."""
    known = profiled(clock, 1, (64, 1, 9), (1, 64)).batch_dimensions
    assert known == {"0": 1, "1": 0}
    settings = {"micro_batch": 64, "batch_dimensions": known}
    short, full = (of_shapes((64, count, 9), (1, 64)) for count in (20, 64))
    told = told_of(clock, short, **settings)
    assert told.kind is OutcomeKind.INVALID and "has 20 samples" in told.message
    assert told_of(clock, *[full] * 4, short, **settings).warnings == (SHORT_BATCHES,)


def test_a_batch_that_no_configuration_changes_is_known_from_the_profile(clock: Clock) -> None:
    """The configuration says 4, but the script has a constant of 12."""
    seen = profiled(clock, 1, (12, 3), (12,), own=4).fed_instead
    assert seen == {"micro_batch": 1, "rows": 12}

    def told(micro_batch: int) -> Outcome:
        batch = of_shapes((12, 3), (12,))
        own = {"own_micro_batch": 4, "fed_instead": seen}
        return told_of(clock, batch, micro_batch=micro_batch, **own)

    [warning] = told(4).warnings
    assert told(4).fixed_batch == 12
    assert is_about(warning) and warning != UNCOUNTED
    for micro_batch, most in ((2, None), (16, 12)):
        found = told(micro_batch)
        assert found.kind is OutcomeKind.INVALID and found.most_samples == most
        assert found.fixed_batch == 12
        assert all(word in found.message for word in ("12 samples whatever", "engine.train_micro"))
    assert told(12).ok and told(12).warnings == ()


def test_pairs_that_grow_with_the_micro_batch_are_not_refused(clock: Clock) -> None:
    seen = profiled(clock, 1, (2, 3), own=4).fed_instead
    assert seen == {"micro_batch": 1, "rows": 2}
    told = told_of(clock, of_shapes((8, 3)), micro_batch=4, own_micro_batch=4, fed_instead=seen)
    assert told.ok and told.warnings == (UNCOUNTED,)


@pytest.mark.parametrize(
    ("rows", "micro_batch"),
    [
        ([3, 16, 8, 5, 11], 8),  # fewer than the micro batch at first
        ([5, 16, 8, 3], 4),  # as many at first as in the profile trial
        ([8, 5, 11, 3, 5], 8),  # the micro batch at first, by chance
        ([16, 3, 8, 5], 16),  # the same, and the largest
        ([2, 5, 3], 1),  # the user's own micro batch at first
    ],
)
@pytest.mark.parametrize("own", [2, 8, 16])
def test_batches_filled_by_tokens_are_not_refused(
    clock: Clock, rows: list[int], micro_batch: int, own: int
) -> None:
    seen = {"micro_batch": 2 * micro_batch, "rows": rows[0]}
    batches = [of_shapes((count, 128)) for count in rows]
    told = told_of(
        clock,
        *batches,
        micro_batch=micro_batch,
        own_micro_batch=own,
        fed_instead=seen,
        profile=True,
    )
    assert told.ok and told.warnings == (UNCOUNTED,), told
    assert told.metrics is not None and told.profile is not None
    assert told.metrics.throughput == pytest.approx(micro_batch / 0.010), "assumed to be full"
    assert told.fixed_batch is None and told.profile.fed_instead == {}


@pytest.mark.slow
def test_one_rank_with_batches_filled_by_tokens_is_enough(tmp_path: Path) -> None:
    script = """
engine = make_engine()
for batch in range(1000):
    rows = [3, 5, 1][batch % 3] if RANK else 3
    engine.backward(engine(torch.randn(rows, 16)).square().mean())
    engine.step()
"""
    with scripts_in(tmp_path, slots_per_trial=2) as scripts:
        assert scripts.run(script, micro_batch=4).well().warnings == (UNCOUNTED,)


def test_the_last_batch_of_an_epoch_does_not_hide_a_fixed_batch(clock: Clock) -> None:
    batches = [of_shapes((count, 128)) for count in (4, 4, 1)]
    told = told_of(clock, *batches, micro_batch=2, own_micro_batch=4, batch_dimensions={"0": 0})
    assert (told.kind, told.fixed_batch) == (OutcomeKind.INVALID, 4)


def test_batches_smaller_than_the_own_micro_batch_are_counted(clock: Clock) -> None:
    told = told_of(clock, of_shapes((3, 128)), micro_batch=8, own_micro_batch=8)
    [warning] = told.warnings
    assert "has 3 samples, fewer than the micro batch of 8" in warning and is_about(warning)
    assert told.metrics is not None
    assert told.metrics.throughput == pytest.approx(3 / 0.010)


LIKELIEST = "data.per_device_train_batch_size"


@pytest.mark.parametrize(
    ("args", "options", "flag"),
    [
        (["--epochs", "3", "--batch_size", "7"], {}, "--batch_size"),
        (["--eval_batch_size", "7", "--train.batch=7"], {}, "--train.batch"),
        (["--eval_batch_size", "7", "--train.batch=8"], {}, ""),  # of all devices, perhaps
        (["model.width=7", "train.batch_size=7"], {}, "train.batch_size"),
        (["--bs", "7"], {}, "--bs"),
        (["-b", "7"], {}, "-b"),
        (["-k", "7"], {}, ""),
        (["--micro-bsz=7"], {}, "--micro-bsz"),
        (["--obs", "7"], {}, ""),
        (["--batch-size"], {}, ""),
        # Declared with this default, and not given.
        ([], {"--lr": 7, "--batch-log": None, "--micro-batch-size": 7}, "--micro-batch-size"),
        (["--batch-log", "9"], {"--batch-log": None, "--micro_batch": 7}, "--micro_batch"),
        (["--micro_batch", "9"], {"--micro_batch": 7}, ""),
        ([], {"--eval_batch_size": 7}, ""),
        # Flags of something else, and less likely ones, although they come first.
        (["--val_batch_size", "7", "--batch_size", "7"], {}, "--batch_size"),
        (["--log_every_n_batches", "7", "--gen-batch=7"], {"--batch_size": 7}, "--batch_size"),
        (["--max_batches", "7", "--loader_batch", "7"], {}, "--loader_batch"),
        (["--loader_batch=7", "data.per_device_train_batch_size=7"], {}, LIKELIEST),
        (["--max_batches", "7"], {}, "--max_batches"),
    ],
)
def test_the_flag_of_the_batch_size_is_one_that_the_script_has(
    args: list[str], options: dict[str, Any], flag: str
) -> None:
    assert find_batch_flag(args, 7, options) == flag


def test_half_of_a_fixed_batch_is_no_batch_of_pairs(clock: Clock) -> None:
    known = profiled(clock, 8, (8, 3), own=8).batch_dimensions
    found = told_of(
        clock, of_shapes((8, 3)), micro_batch=4, own_micro_batch=8, batch_dimensions=known
    )
    assert (found.kind, found.fixed_batch) == (OutcomeKind.INVALID, 8)


# -- tokens


@pytest.mark.parametrize(
    ("args", "tokens", "length"),
    [
        ([IDS], 36, 9),
        ([IDS.T], 36, 9),  # time first
        ([{"input_ids": IDS, "labels": IDS}], 36, 9),
        ([{"attention_mask": MASK, "input_ids": IDS}], 10, 9),
        ([{"attention_mask": 3 * MASK, "input_ids": IDS}], 10, 9),  # numbers of documents
        ([{"input_ids": IDS, "attention_mask": torch.ones(4, 1, 9, 9)}], 36, 9),
        ([{"text": {"input_ids": IDS, "attention_mask": MASK}, "pair": PAIR}], 46, 9),
        ([{"text": {"input_ids": IDS}, "pairs": {"input_ids": LABELS.repeat(2, 1)}}], 356, 40),
        ([[IDS, LABELS]], 36, 9),
        ([torch.ones(1, 640, dtype=torch.long)], 640, None),  # all samples in one row
        ([IMAGES, LABELS], None, None),
        ([torch.zeros(4, 9)], None, None),
        ([torch.ones(4, 1, dtype=torch.bool)], None, None),
    ],
)
def test_tokens(clock: Clock, args: list[Any], tokens: float | None, length: int | None) -> None:
    told = told_of(clock, args, micro_batch=4)
    assert told.metrics is not None, told
    per_second = told.metrics.tokens_per_second
    assert per_second == (None if tokens is None else pytest.approx(tokens / 0.010))
    assert told.sequences == (None if length is None else SequenceLengths(length, length))


def test_lengths_over_the_micro_steps(clock: Clock) -> None:
    engine = Engine(clock, gas=3)
    inner: Any = nn.Linear(2, 2)
    inner.config = SimpleNamespace(max_position_embeddings=512)
    engine.module = nn.Sequential(inner)  # as PEFT wraps a transformers model
    attach(engine, gas=3)

    def loop() -> None:
        while True:
            for length in (7, 30, 12):
                engine.backward(engine.forward(torch.ones(4, length, dtype=torch.long)))
                engine.step()

    assert measured_by(loop).sequences == SequenceLengths(7, 30, 512)


class Words(list[int]):
    """A list that counts how often it is iterated."""

    walks = 0

    def __iter__(self) -> Iterator[int]:
        self.walks += 1
        return super().__iter__()


def test_a_large_list_without_tensors_is_walked_once() -> None:
    finder, words, few = LeafFinder(), Words(range(1000)), Words(range(10))
    for size in (2, 3):
        batch = {"ids": torch.zeros(size, 4), "words": [words], "few": few}
        assert {place: len(leaf) for place, leaf in finder.find([batch]).items()} == {"0.ids": size}
    assert (words.walks, few.walks) == (1, 2), "a small one may have tensors later"
    few[:] = [torch.zeros(1)]  # type: ignore[list-item]
    assert list(finder.find([batch])) == ["0.ids", "0.few.0"]
