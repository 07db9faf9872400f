"""A script that feeds its own batch size is found out, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsat.errors import InvalidTrial
from dsat.in_trial.conformance import check_inputs

TRIAL, OWN = 5, 8


def feed(*shapes: tuple[int, ...]) -> list[Any]:
    return [torch.zeros(shape) for shape in shapes]


def verdict(values: list[Any], micro_batch: int = TRIAL, own: int | None = OWN) -> str:
    try:
        warning = check_inputs(values, micro_batch=micro_batch, own=own)
    except InvalidTrial:
        return "invalid"
    return "warns" if warning else "fine"


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
        ([], "fine"),
        ([()], "fine"),
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
        (1, 4, 1, "invalid"),
        (8, 16, 8, "invalid"),
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
        check_inputs(feed((8, 3)), micro_batch=TRIAL, own=OWN)
    message = str(caught.value)
    assert "feeds 8 samples" in message and "is 5" in message
    assert "engine.train_micro_batch_size_per_gpu()" in message
    assert "--arg-mapping train_micro_batch_size_per_gpu=--batch-size" in message
    assert "\n" not in message
