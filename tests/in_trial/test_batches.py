"""Counts of what a script feeds: samples and tokens, in any form."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsat.errors import InvalidTrial
from dsat.in_trial.batches import UNCOUNTED, BatchCounter, batch_flag, is_about, leaves_of
from dsat.values.outcome import SequenceLengths

TRIAL, OWN = 5, 8
IDS = torch.ones(4, 9, dtype=torch.long)
MASK = torch.ones(4, 9, dtype=torch.long).tril()  # 1 + 2 + 3 + 4 of them
IMAGES = torch.zeros(4, 3, 8, 8)
LABELS = torch.ones(4, 40, dtype=torch.long)
PAIR = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
Shape = tuple[int, ...]


def rows_of(counter: BatchCounter, *shapes: Shape) -> int | None:
    return counter.count(leaves_of([torch.zeros(shape) for shape in shapes])).rows


def verdict(shapes: list[Shape], micro_batch: int = TRIAL, own: int | None = OWN) -> str:
    counter = BatchCounter(micro_batch, own)
    try:
        rows = rows_of(counter, *shapes)
    except InvalidTrial as error:
        return "short" if error.smaller_may_run else "invalid"
    assert (rows is None) == (counter.warning == UNCOUNTED)
    return "fine" if rows is not None else "warns"


def test_images_of_a_text_are_no_samples() -> None:
    counter = BatchCounter(1)
    for images in (1, 3, 5):
        inputs = {"pixel_values": torch.zeros(images, 3, 8, 8), "input_ids": IDS[:1]}
        assert counter.count(leaves_of([inputs])).rows == 1


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
        ([(2, 90), (4, 16)], "warns"),  # the edges and nodes of a graph
    ],
)
def test_shapes(shapes: list[Shape], expected: str) -> None:
    assert verdict(shapes) == expected


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
def test_sizes(rows: int, micro_batch: int, own: int | None, expected: str) -> None:
    assert verdict([(rows, 128)], micro_batch, own) == expected


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
def test_rows_are_counted_in_any_form(wrap: Callable[[torch.Tensor], Any]) -> None:
    counter = BatchCounter(5)
    for rows, length in ((5, 9), (5, 7), (2, 99)):
        assert counter.count(leaves_of([wrap(torch.zeros(rows, length))])).rows == rows


def seen_in_the_profile(micro_batch: int, *shapes: Shape) -> dict[str, int]:
    counter = BatchCounter(micro_batch)
    rows_of(counter, *shapes)
    return counter.dimensions


def test_features_as_many_as_the_micro_batch_are_no_samples() -> None:
    """96 samples of 256 features, and a micro batch of 256."""
    known = seen_in_the_profile(4, (4, 256))
    with pytest.raises(InvalidTrial, match="the first batch has 96 samples") as error:
        rows_of(BatchCounter(256, 4, known), (96, 256))
    assert error.value.most_samples == 96
    full = BatchCounter(256, 4, known)
    assert [rows_of(full, (n, 256)) for n in (256, 96)] == [256, 96]
    assert seen_in_the_profile(4, (4, 4), (4,), (9, 4)) == {"1": 0, "2": 1}, "4 by 4 tells nothing"


def test_time_steps_as_many_as_the_micro_batch_are_no_samples() -> None:
    known = seen_in_the_profile(1, (64, 1, 9), (1, 64))  # time first, with a mask for all samples
    assert known == {"0": 1, "1": 0}
    with pytest.raises(InvalidTrial, match="the first batch has 20 samples"):
        rows_of(BatchCounter(64, None, known), (64, 20, 9), (1, 64))
    counter = BatchCounter(64, None, known)
    assert rows_of(counter, (64, 64, 9), (1, 64)) == 64
    assert rows_of(counter, (64, 20, 9), (1, 64)) == 20


def test_a_batch_that_no_configuration_changes_is_known_from_the_profile() -> None:
    """The configuration says 4, and the script has a constant of 12."""
    profiled = BatchCounter(1, 4)
    assert rows_of(profiled, (12, 3), (12,)) is None and profiled.warning == UNCOUNTED
    seen = profiled.fed_instead
    assert seen == {"micro_batch": 1, "rows": 12}

    own = BatchCounter(4, 4, fed_before=seen)
    assert rows_of(own, (12, 3), (12,)) == 12
    assert own.warning is not None and is_about(own.warning) and own.warning != UNCOUNTED
    for micro_batch, most in ((2, None), (16, 12)):
        with pytest.raises(InvalidTrial, match=r"feeds 12 samples whatever .* --arg-mapping") as e:
            rows_of(BatchCounter(micro_batch, 4, fed_before=seen), (12, 3), (12,))
        assert e.value.most_samples == most
    equal = BatchCounter(12, 4, fed_before=seen)
    assert rows_of(equal, (12, 3), (12,)) == 12 and equal.warning is None


def test_pairs_that_grow_with_the_micro_batch_are_not_refused() -> None:
    first, second = BatchCounter(1, 4), BatchCounter(4, 4, fed_before={"micro_batch": 1, "rows": 2})
    rows_of(first, (2, 3))
    assert first.fed_instead == {"micro_batch": 1, "rows": 2}
    rows_of(second, (8, 3))
    assert second.warning == UNCOUNTED


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (["--epochs", "3", "--batch_size", "7"], "--batch_size"),
        (["--eval_batch_size", "32", "--train.batch=7"], "--train.batch"),
        (["--bs", "7"], None),
        (["--batch-size"], "--batch-size"),
    ],
)
def test_the_flag_of_the_batch_size_is_one_that_the_script_was_given(
    args: list[str], flag: str | None
) -> None:
    assert batch_flag(args, 7) == flag


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
def test_tokens(args: list[Any], tokens: float | None, length: int | None) -> None:
    counter = BatchCounter(4)
    fed = counter.count(leaves_of(args))
    assert (None if fed.tokens is None else float(fed.tokens)) == tokens
    lengths = counter.lengths(nn.Linear(2, 2), lambda values: values)
    assert lengths == (None if length is None else SequenceLengths(length, length))


def test_lengths_over_the_micro_steps() -> None:
    counter = BatchCounter(4)
    for length in (7, 30, 12):
        counter.count(leaves_of([torch.ones(4, length, dtype=torch.long)]))
    model = nn.Sequential(nn.Linear(2, 2))  # as PEFT wraps a transformers model
    model[0].config = SimpleNamespace(max_position_embeddings=512)  # type: ignore[assignment]
    assert counter.lengths(model, lambda values: values) == SequenceLengths(7, 30, 512)
