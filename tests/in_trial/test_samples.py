"""What a script feeds: counted in any form, its own batch size found out, too few samples too."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dsat.errors import InvalidTrial
from dsat.in_trial.samples import UNCOUNTED, SampleCounter, batch_flag, is_about, leaves_of

TRIAL, OWN = 5, 8


def feed(*shapes: tuple[int, ...]) -> list[Any]:
    return [torch.zeros(shape) for shape in shapes]


def verdict(values: list[Any], micro_batch: int = TRIAL, own: int | None = OWN) -> str:
    counter = SampleCounter(micro_batch, own)
    try:
        counter.first(leaves_of(values))
    except InvalidTrial as error:
        return "short" if error.smaller_may_run else "invalid"
    return "fine" if counter.counts else "warns"


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(8, 128)], "invalid"),
        ([(8, 128), (8,)], "invalid"),
        ([(8, 3, 32, 32), ()], "invalid"),
        ([(8, 8)], "invalid"),
        ([(8, 128), (1, 128)], "invalid"),  # positions, the same for all samples
        ([(5, 128)], "fine"),
        ([(5, 8)], "fine"),  # a sequence as long as the own micro batch
        ([(8, 5)], "fine"),  # the same, time first
        ([(5, 128), (8, 8)], "fine"),  # with a mask over it
        ([(8, 8), (5, 8)], "fine"),
        ([(640, 16)], "warns"),  # all samples in one row
        ([(1, 640)], "warns"),
        ([(1, 8)], "warns"),
        ([(10, 8)], "warns"),  # pairs of sequences as long as the own micro batch
        ([(8, 128), (640,)], "warns"),
        ([(128, 8)], "warns"),  # time first, which short sequences look like
        ([(16, 128)], "warns"),
        ([], "warns"),  # nothing to count
        ([()], "warns"),
        ([(3, 128)], "short"),
        ([(3, 128), (3,), (1, 128)], "short"),
        ([(2, 90), (4, 16)], "warns"),  # the edges and nodes of a graph
    ],
)
def test_shapes(shapes: list[tuple[int, ...]], expected: str) -> None:
    assert verdict(feed(*shapes)) == expected


@pytest.mark.parametrize(
    ("rows", "micro_batch", "own", "expected"),
    [
        (8, 4, 8, "warns"),  # pairs of the trial's four, perhaps
        (8, 2, 8, "invalid"),
        (8, 1, 8, "invalid"),
        (2, 1, 2, "warns"),
        (3, 1, 3, "invalid"),
        (1, 4, 1, "short"),  # its own batch is the largest that there is
        (8, 16, 8, "short"),
        (8, 8, 8, "fine"),
        (16, 8, 8, "warns"),
        (8, 5, None, "warns"),
    ],
)
def test_sizes(rows: int, micro_batch: int, own: int | None, expected: str) -> None:
    assert verdict(feed((rows, 128)), micro_batch, own) == expected


def test_nested_inputs_are_seen() -> None:
    [inputs] = feed((8, 3))
    for values in ([{"ids": inputs}], [[inputs, inputs]], [(inputs, None)], [inputs, "word", 3]):
        assert verdict(values) == "invalid"


def test_the_message_says_how_to_mend_it() -> None:
    with pytest.raises(InvalidTrial) as caught:
        SampleCounter(TRIAL, OWN).first(leaves_of(feed((8, 3))))
    message = str(caught.value)
    assert "feeds 8 samples" in message and "is 5" in message
    assert "engine.train_micro_batch_size_per_gpu()" in message
    assert "--arg-mapping train_micro_batch_size_per_gpu=--batch-size" in message
    assert "\n" not in message


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    names: list[str]


class Holder:
    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda ids: ids,
        lambda ids: {"ids": ids, "text": "words"},
        lambda ids: UserDict(ids=ids),  # as transformers' BatchEncoding is
        lambda ids: OrderedDict(ids=ids),
        lambda ids: (None, [ids, 3]),
        lambda ids: Batch(ids, ["a", "b"]),
        lambda ids: Holder(ids),
        lambda ids: {"inputs": {"deep": [ids]}},
        lambda ids: ids.transpose(0, 1),
        lambda ids: (torch.zeros(1, 77), ids),  # positions, the same for all samples
        lambda ids: nn.utils.rnn.pack_sequence([row[: 3 + i] for i, row in enumerate(ids)][::-1]),
        lambda ids: torch.nested.nested_tensor(list(ids)),
    ],
)
def test_rows_are_counted_in_any_form(wrap: Callable[[torch.Tensor], Any]) -> None:
    counter = SampleCounter(5, None)
    counter.first(leaves_of([wrap(torch.zeros(5, 9))]))
    assert counter.counts
    for rows in (5, 2, 7):
        assert counter.rows(leaves_of([wrap(torch.zeros(rows, 9))])) == rows


def seen_in_the_profile(micro_batch: int, *shapes: tuple[int, ...]) -> dict[str, int]:
    counter = SampleCounter(micro_batch, None)
    counter.first(leaves_of([torch.zeros(shape) for shape in shapes]))
    return counter.dimensions


@pytest.mark.parametrize("profiled", [1, 4])
def test_features_as_many_as_the_micro_batch_are_no_samples(profiled: int) -> None:
    """96 samples of 256 features, and a micro batch of 256."""
    known = seen_in_the_profile(profiled, (profiled, 256))
    counter = SampleCounter(256, 4, known)
    with pytest.raises(InvalidTrial, match="the first batch has 96 samples"):
        counter.first(leaves_of([torch.zeros(96, 256)]))
    full = SampleCounter(256, 4, known)
    full.first(leaves_of([torch.zeros(256, 256)]))
    assert [full.rows(leaves_of([torch.zeros(n, 256)])) for n in (256, 96)] == [256, 96]


def test_time_steps_as_many_as_the_micro_batch_are_no_samples() -> None:
    known = seen_in_the_profile(1, (64, 1, 9), (1, 64))  # time first, with a mask for all samples
    assert known == {"0": 1, "1": 0}
    with pytest.raises(InvalidTrial, match="the first batch has 20 samples"):
        SampleCounter(64, None, known).first(
            leaves_of([torch.zeros(64, 20, 9), torch.zeros(1, 64)])
        )
    counter = SampleCounter(64, None, known)
    counter.first(leaves_of([torch.zeros(64, 64, 9), torch.zeros(1, 64)]))
    assert counter.rows(leaves_of([torch.zeros(64, 20, 9), torch.zeros(1, 64)])) == 20


def test_a_size_that_two_dimensions_have_tells_nothing() -> None:
    assert seen_in_the_profile(4, (4, 4), (4,), (9, 4)) == {"1": 0, "2": 1}


def test_sequences_of_several_lengths_are_counted_by_their_number() -> None:
    counter = SampleCounter(5, None)
    counter.first(leaves_of([torch.zeros(5, 31)]))
    assert [
        counter.rows(leaves_of([torch.zeros(n, length)])) for n, length in ((5, 7), (3, 99))
    ] == [5, 3]


def test_too_few_samples_are_told_by_their_number() -> None:
    with pytest.raises(
        InvalidTrial, match="has 96 samples, fewer than the micro batch of 128"
    ) as e:
        SampleCounter(128, 8).first(leaves_of([torch.zeros(96, 4), torch.zeros(96)]))
    assert e.value.most_samples == 96


def first_step(rows: int, counter: SampleCounter) -> SampleCounter:
    counter.first(leaves_of([torch.zeros(rows, 3), torch.zeros(rows)]))
    return counter


def test_a_batch_that_no_configuration_changes_is_known_from_the_profile() -> None:
    """The configuration says 4, and the script has a constant of 12."""
    profiled = first_step(12, SampleCounter(1, 4))
    assert (profiled.counts, profiled.warning) == (False, UNCOUNTED)
    seen = profiled.fed_instead
    assert seen == {"micro_batch": 1, "rows": 12}

    own = first_step(12, SampleCounter(4, 4, fed_instead=seen))
    assert own.rows(leaves_of([torch.zeros(12, 3), torch.zeros(12)])) == 12
    assert own.warning is not None and is_about(own.warning)
    assert own.warning.startswith("the script feeds 12 samples whatever")
    for micro_batch, most in ((2, None), (6, None), (16, 12)):
        with pytest.raises(InvalidTrial, match=r"feeds 12 samples whatever .* --arg-mapping") as e:
            first_step(12, SampleCounter(micro_batch, 4, fed_instead=seen))
        assert e.value.most_samples == most
    equal = first_step(12, SampleCounter(12, 4, fed_instead=seen))
    assert equal.counts and equal.warning is None


def test_pairs_that_grow_with_the_micro_batch_are_not_refused() -> None:
    seen = first_step(2, SampleCounter(1, 4)).fed_instead
    assert seen == {"micro_batch": 1, "rows": 2}
    assert first_step(8, SampleCounter(4, 4, fed_instead=seen)).warning == UNCOUNTED


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        (["--epochs", "3", "--batch_size", "7"], "--batch_size"),
        (["--eval_batch_size", "32", "--train.batch=7"], "--train.batch"),
        (["--bs", "7"], None),
        ([], None),
        (["--batch-size"], "--batch-size"),
    ],
)
def test_the_flag_of_the_batch_size_is_one_that_the_script_was_given(
    args: list[str], flag: str | None
) -> None:
    assert batch_flag(args, 7) == flag
